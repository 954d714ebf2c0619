"""The best sequence of layouts: what each stage takes, and what going from one to the next takes.

The best layout of every stage alone may be dear to reshard between. Among the few best of each stage the
cheapest sequence is found exactly by dynamic programming over stages (Bellman 1957).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.compiler.problem import Problem
from shipway.compiler.reshard import Resharding, reshardings, state_tensors
from shipway.compiler.search import IN_SEQUENCES, Found, verdict_rank

Floats = npt.NDArray[np.float64]


def best_sequence(stages: Sequence[Floats], changes: Sequence[Floats]) -> tuple[int, ...]:
    """Choice of each stage that makes the sum of stages and changes least; of equals, the earliest choices.

    `stages[i]` [options] is the cost of stage i under each option, `changes[i]` [options of i, options of
    i + 1] that of going on.
    """
    # From the end: the least that the rest of the programme takes after each option.
    rest = [np.zeros(len(stages[-1]))]
    for own, change in zip(reversed(stages[1:]), reversed(changes), strict=True):
        rest.insert(0, (change + own + rest[0]).min(axis=1))
    chosen = [int(np.argmin(stages[0] + rest[0]))]
    for own, change, after in zip(stages[1:], changes, rest[1:], strict=True):
        chosen.append(int(np.argmin(change[chosen[-1]] + own + after)))
    return tuple(chosen)


@frozen
class Programme:
    """What was found of each stage, with the choices that are best together, and the changes between."""

    found: tuple[Found, ...]
    changes: tuple[Resharding, ...]

    def summary(self) -> dict[str, object]:
        """The layouts and the changes, to look at."""
        layouts = [found.candidates.layout(found.best) for found in self.found if found.best is not None]
        return {"layouts": layouts, "changes": self.changes}


def programme(stages: Sequence[tuple[Problem, Found]]) -> Programme:
    """Choose each stage's layout knowing its neighbours'; every stage must have one that fits.

    The objective `memory` has no price for time: there each stage keeps its own best.
    """
    blueprint = stages[0][0].blueprint
    options = [_options(problem, found) for problem, found in stages]
    tensors = state_tensors(stages[0][0].work, blueprint.training)
    layouts = [
        [found.candidates.layout(index) for index in own]
        for (_, found), own in zip(stages, options, strict=True)
    ]
    changes = reshardings(tensors, blueprint.cluster, layouts)
    is_cost = blueprint.training.objective == "cost"
    chosen = best_sequence(
        [_stage_cost(p, found, own) for (p, found), own in zip(stages, options, strict=True)],
        [change.device_seconds if is_cost else change.seconds for change in changes],
    )
    return Programme(
        tuple(
            replace(found, best=own[place])
            for (_, found), own, place in zip(stages, options, chosen, strict=True)
        ),
        tuple(change.between(*pair) for change, pair in zip(changes, pairwise(chosen), strict=True)),
    )


def _options(problem: Problem, found: Found) -> list[int]:
    """The best few layouts with the verdict of the best."""
    assert found.best is not None
    if problem.blueprint.training.objective == "memory":
        return [found.best]
    rank = verdict_rank(found.peak_bytes, found.upper_bytes, problem.capacity_bytes)
    return [int(index) for index in found.order if rank[index] == rank[found.best]][:IN_SEQUENCES]


def _stage_cost(problem: Problem, found: Found, options: Sequence[int]) -> Floats:
    """Seconds of a stage under each option, times devices where cost is the objective."""
    seconds: Floats = found.step_seconds[list(options)] * problem.stage.steps
    if problem.blueprint.training.objective == "cost":
        seconds = seconds * found.candidates.world[list(options)]
    return seconds
