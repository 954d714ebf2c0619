"""Python's cyclic garbage is collected between steps, on all ranks alike, and never within one."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

EVERY_STEPS = 50


@dataclass
class Garbage:
    """Takes collection over from Python: one rank that collects makes all the others wait."""

    _steps: int = 0

    def __post_init__(self) -> None:
        gc.disable()

    def step_ends(self) -> None:
        """Count a step, and collect when it is time.

        What compiling and first uses took from the device in the first step is given back: the allocator
        would keep it, in pieces that later steps may not fit into.
        """
        self._steps += 1
        if self._steps % EVERY_STEPS == 0 or self._steps == 1:
            gc.collect()
        if self._steps == 1 and torch.cuda.is_available():
            torch.cuda.empty_cache()
