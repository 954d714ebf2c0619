"""The environment of the workers, in three layers: defaults, the blueprint's, and what the launcher owns."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shipway.compiler.launch.job import Programme

OWNED = re.compile(
    r"^(SHIPWAY_.*|PET_.*|TORCHELASTIC_.*|MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE"
    r"|LOCAL_WORLD_SIZE|CUDA_VISIBLE_DEVICES)$"
)
"""Set by the launcher, torchrun or the scheduler: a blueprint that sets one breaks the rendezvous."""
SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)", re.IGNORECASE
)
"""Names of values that must not be written into a file."""
SECRET_VALUE = re.compile(
    r"^(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w.-]{12}|PRIVATE KEY-|://[^/@\s]*:[^/@\s]+@"
)
"""Values that give themselves away: published forms of tokens, private keys, passwords in addresses."""


@dataclass(frozen=True)
class Variable:
    """One environment variable and why it is there."""

    name: str
    value: str
    why: str = ""


_GPU_DEFAULTS = (
    Variable("PYTORCH_ALLOC_CONF", "expandable_segments:True", "fragmentation is what breaks a tight budget"),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "a hung collective ends the process instead of the night"
    ),
    Variable("TORCH_FR_BUFFER_SIZE", "20000", "collectives that the flight recorder keeps"),
    Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "say which rank did not come"),
)


def defaults(programme: Programme) -> tuple[Variable, ...]:
    """What every run gets, unless the blueprint says otherwise."""
    threads = Variable("OMP_NUM_THREADS", "1", "processes share the cores")
    every = (threads, Variable("PYTHONUNBUFFERED", "1", "logs appear as they are written"))
    return (*_GPU_DEFAULTS, *every) if programme.on_gpus else every


def of_blueprint(programme: Programme) -> tuple[Variable, ...]:
    """What the blueprint says of the site, in alphabetic order."""
    environment = programme.cluster.target.environment
    return tuple(Variable(name, environment[name]) for name in sorted(environment))


def layers(programme: Programme) -> tuple[tuple[str, tuple[Variable, ...]], ...]:
    """The first two layers with their titles; a default that the blueprint sets itself is left out."""
    own = of_blueprint(programme)
    taken = {variable.name for variable in own}
    kept = tuple(variable for variable in defaults(programme) if variable.name not in taken)
    return (("Defaults", kept), ("Of the site, from the blueprint", own))


def refused(programme: Programme) -> list[tuple[str, str]]:
    """Names in the blueprint's environment that may not be there, each with the reason."""
    found = []
    for variable in of_blueprint(programme):
        if OWNED.match(variable.name):
            found.append((variable.name, "belongs to the launcher: it says who is which rank"))
        elif SECRET.search(variable.name) or SECRET_VALUE.search(variable.value):
            found.append(
                (variable.name, "looks like a secret, and would be written into scripts and records")
            )
    return found
