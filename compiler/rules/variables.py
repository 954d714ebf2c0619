"""Variables that may not stand in a blueprint, as it is written into plans, scripts and records."""

from __future__ import annotations

import re

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


def refusal(name: str, value: str) -> str | None:
    """Why a variable may not be there; None when it may."""
    if OWNED.match(name):
        return "belongs to the launcher: it says who is which rank"
    if SECRET.search(name) or SECRET_VALUE.search(value):
        return "looks like a secret, and would be written into plans, scripts and records"
    return None
