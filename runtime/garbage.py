"""Python's cyclic garbage is collected between steps, on all ranks alike, and never within one."""

from __future__ import annotations

import gc
from dataclasses import dataclass

EVERY_STEPS = 50


@dataclass
class Garbage:
    """Takes collection over from Python: one rank that collects makes all the others wait."""

    _steps: int = 0

    def __post_init__(self) -> None:
        gc.disable()

    def step_ends(self) -> None:
        """Count a step, and collect when it is time."""
        self._steps += 1
        if self._steps % EVERY_STEPS == 0:
            gc.collect()
