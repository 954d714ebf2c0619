"""Orders of the V-shaped pipeline schedules, as torch.distributed.pipelining has them.

Every rank holds two chunks, one on the way down the ranks and one on the way back up, so that loss and
embedding sit on rank 0. Backward comes in two parts: `I`, gradients of the chunk's input, which the rank
before waits for, and `W`, gradients of its weights, which fill what would be bubbles; `B` is both at once.

zbv: ScheduleZBVZeroBubble, Qi et al. 2023 (arXiv 2401.10241), section 6. dualpipev: ScheduleDualPipeV,
the form of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) that keeps parameters once.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.schemas.layout import Schedule

IntArray = npt.NDArray[np.int64]

Kind = Literal["F", "B", "I", "W"]
Number: TypeAlias = Any


@frozen
class Action:
    """One pass of one micro-batch through one model chunk: forward, backward, or one part of backward."""

    kind: Kind
    chunk: int
    """Model chunk, in model order."""
    micro_batch: int


def least_micro_batches(schedule: Schedule, pp: Number) -> Number:
    """The fewest micro-batches that a schedule fills `pp` ranks with; ranks may be an array."""
    return 2 * pp if schedule == "dualpipev" else pp


KINDS: tuple[Kind, ...] = ("F", "I", "W", "B")


def v_orders(schedule: Schedule, pp: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank, in order."""
    return tuple(
        tuple(
            Action(KINDS[kind], 2 * pp - 1 - rank if own else rank, number)
            for kind, own, number in steps.tolist()
        )
        for rank, steps in enumerate(v_steps(schedule, pp, micro_batches))
    )


@lru_cache(maxsize=256)
def v_steps(schedule: Schedule, pp: int, micro_batches: int) -> tuple[IntArray, ...]:
    """The same as rows of (index into KINDS, own chunk, micro-batch), one array [actions, 3] a rank.

    The own chunk is 0 on the way down, 1 on the way up.
    """
    steps = _zbv if schedule == "zbv" else _dualpipev
    return tuple(_numbered(steps(pp, micro_batches, rank), micro_batches) for rank in range(pp))


F0, F1, I0, I1, W0, W1, B0, B1 = range(8)
"""What is done, and which of the rank's two chunks it is done with: `F0` is a forward on the way down."""
TURNS = ((F0,), (F1,), (W0, B0), (W1, B1), (I0, B0), (I1, B1))
"""Steps that go through the micro-batches in turn: a whole backward is among weight and input parts."""
IN_TURN = np.array([[step in turn for turn in TURNS] for step in range(8)], dtype=np.int64)
"""[steps, turns]."""
TURN_OF = np.array([max(i for i, turn in enumerate(TURNS) if step in turn) for step in range(8)])
"""The turn that a step is numbered in; of whole backwards that of their input parts."""


def _numbered(steps: list[int], micro_batches: int) -> IntArray:
    """Micro-batches go through every chunk in turn; those beyond the last one are left out."""
    step = np.array(steps, dtype=np.int64)
    number = np.cumsum(IN_TURN[step], axis=0)[np.arange(len(step)), TURN_OF[step]] - 1
    result: IntArray = np.column_stack([step >> 1, step & 1, number])[number < micro_batches]
    return result


def _zbv(pp: int, micro_batches: int, rank: int) -> list[int]:
    """Warm-up, one forward and one backward of each chunk in turn, cool-down with weights deferred."""
    count = max(2 * pp - 1, micro_batches)
    ahead = 2 * pp - 1 - rank
    steps = [F0] * (2 * (pp - rank) - 1)
    steps += [F1, F0] * rank
    steps += [F1, I1, W1] * (pp - rank)
    both = [I0, W0, F1, I1, W1]
    steps += [F0, *both] * (count - ahead)
    steps += both * (ahead - pp)
    steps += [I0, I1] * rank
    steps += [I0, W0] * (pp - rank)
    return steps + [W1] * rank + [W0] * rank


def _dualpipev(pp: int, micro_batches: int, rank: int) -> list[int]:
    """Whole backwards in the steady state, each beside a forward; parts only where a bubble would be."""
    below = pp - rank - 1
    deferred: deque[int] = deque()
    steps: list[int] = []

    def backward(own: int, split: bool) -> None:
        steps.append((I0 if split else B0) + own)
        if split:
            deferred.append(own)

    def weight() -> None:
        if deferred:
            steps.append(W0 + deferred.popleft())

    steps += [F0] * (2 * below)
    steps += [F0, F1] * (rank + 1)
    for _ in range(below):
        backward(1, split=True)
        weight()
        steps.append(F1)
    steps += [F0, B1, F1, B0] * (micro_batches - 2 * pp + rank + 1)
    steps += [B1, F1, B0] * below
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
