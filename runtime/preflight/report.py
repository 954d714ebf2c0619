"""What one node says of itself."""

from __future__ import annotations

import os
import socket
from typing import Literal

from shipway.schemas.base import Schema

Outcome = Literal["ok", "warning", "failed"]


class Check(Schema):
    """One thing that was looked at."""

    name: str
    outcome: Outcome
    found: str
    """What is there."""
    planned: str = ""
    """What the plan takes for granted."""


class NodeReport(Schema):
    """All checks of one node."""

    node: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """Checks that keep the node from being used."""
        return tuple(check for check in self.checks if check.outcome == "failed")


def judged(name: str, fine: bool, found: str, planned: str = "") -> Check:
    """A check that either holds or keeps the node from being used."""
    return Check(name=name, outcome="ok" if fine else "failed", found=found, planned=planned)


def node_name() -> str:
    """This node as the scheduler knows it."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("SHIPWAY_NODE") or socket.gethostname()
