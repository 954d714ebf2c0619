"""Orders of the V-shaped pipeline schedules, as torch.distributed.pipelining has them.

Every rank holds two chunks, one on the way down the ranks and one on the way back up, so that loss and
embedding sit on rank 0. Backward comes in two parts: `I`, gradients of the chunk's input, which the rank
before waits for, and `W`, gradients of its weights, which fill what would be bubbles; `B` is both at once.

zbv: ScheduleZBVZeroBubble, Qi et al. 2023 (arXiv 2401.10241), section 6. dualpipev: ScheduleDualPipeV,
the form of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) that keeps parameters once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from shipway.schemas.layout import Schedule

Kind = Literal["F", "B", "I", "W"]
Number: TypeAlias = Any


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one model chunk: forward, backward, or one part of backward."""

    kind: Kind
    chunk: int
    """Model chunk, in model order."""
    micro_batch: int


def least_micro_batches(schedule: Schedule, pp: Number) -> Number:
    """The fewest micro-batches that a schedule fills `pp` ranks with; ranks may be an array."""
    return 2 * pp if schedule == "dualpipev" else pp


def v_orders(schedule: Schedule, pp: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank, in order."""
    return tuple(
        tuple(Action(kind, 2 * pp - 1 - rank if own else rank, number) for kind, own, number in steps)
        for rank, steps in enumerate(v_steps(schedule, pp, micro_batches))
    )


@lru_cache(maxsize=256)
def v_steps(schedule: Schedule, pp: int, micro_batches: int) -> tuple[tuple[tuple[Kind, int, int], ...], ...]:
    """The same as plain tuples (kind, own chunk, micro-batch); the own chunk is 0 going down, 1 going up."""
    steps = _zbv if schedule == "zbv" else _dualpipev
    return tuple(_numbered(steps(pp, micro_batches, rank), micro_batches) for rank in range(pp))


Step = tuple[Kind, int]
"""What is done, and which of the rank's two chunks it is done with: 0 on the way down, 1 on the way up."""


def _numbered(steps: Iterable[Step], micro_batches: int) -> tuple[tuple[Kind, int, int], ...]:
    """Micro-batches go through every chunk in turn; those beyond the last one are left out."""
    done = {"F": [0, 0], "I": [0, 0], "W": [0, 0]}
    numbered = []
    for kind, own in steps:
        counted = done["I" if kind == "B" else kind]
        number = counted[own]
        counted[own] += 1
        if kind == "B":
            done["W"][own] += 1
        if number < micro_batches:
            numbered.append((kind, own, number))
    return tuple(numbered)


def _zbv(pp: int, micro_batches: int, rank: int) -> list[Step]:
    """Warm-up, one forward and one backward of each chunk in turn, cool-down with weights deferred."""
    count = max(2 * pp - 1, micro_batches)
    ahead = 2 * pp - 1 - rank
    steps: list[Step] = [("F", 0)] * (2 * (pp - rank) - 1)
    steps += [("F", 1), ("F", 0)] * rank
    steps += [("F", 1), ("I", 1), ("W", 1)] * (pp - rank)
    both: list[Step] = [("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)]
    steps += [("F", 0), *both] * (count - ahead)
    steps += both * (ahead - pp)
    steps += [("I", 0), ("I", 1)] * rank
    steps += [("I", 0), ("W", 0)] * (pp - rank)
    return steps + [("W", 1)] * rank + [("W", 0)] * rank


def _dualpipev(pp: int, micro_batches: int, rank: int) -> list[Step]:
    """Whole backwards in the steady state, each beside a forward; parts only where a bubble would be."""
    below = pp - rank - 1
    deferred: deque[int] = deque()
    steps: list[Step] = []

    def backward(own: int, split: bool) -> None:
        steps.append(("I" if split else "B", own))
        if split:
            deferred.append(own)

    def weight() -> None:
        if deferred:
            steps.append(("W", deferred.popleft()))

    steps += [("F", 0)] * (2 * below)
    steps += [("F", 0), ("F", 1)] * (rank + 1)
    for _ in range(below):
        backward(1, split=True)
        weight()
        steps.append(("F", 1))
    steps += [("F", 0), ("B", 1), ("F", 1), ("B", 0)] * (micro_batches - 2 * pp + rank + 1)
    steps += [("B", 1), ("F", 1), ("B", 0)] * below
    # Of the last rank + 1 backwards of each chunk, the second half leave their weights for the end.
    whole = (rank + 1) // 2
    for number in range(rank + 1):
        backward(1, split=number > whole or (number == whole and rank % 2 == 1))
        backward(0, split=number >= whole)
    for _ in range(below):
        weight()
        backward(0, split=True)
    for _ in range(rank + 1):
        weight()
    return steps
