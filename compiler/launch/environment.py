"""The environment of the workers, in three layers: defaults, the blueprint's, and what the launcher owns."""

from __future__ import annotations

from shipway.compiler.frozen import frozen
from shipway.compiler.launch.job import Programme
from shipway.compiler.rules.variables import refusal


@frozen
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
    given = of_blueprint(programme)
    return [(each.name, reason) for each in given if (reason := refusal(each.name, each.value))]
