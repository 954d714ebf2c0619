"""Find a stage's best layout: complete over the legal space, best first, with sound pruning.

Layouts are ordered by a lower bound of the objective and evaluated in that order, a batch at a time; the
search ends when the best that fits is no worse than the next bound. Layouts whose memory cannot fit by a
lower bound are never evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from shipway.compiler import bounds
from shipway.compiler.evaluate import Evaluation, Tables, evaluate, tables
from shipway.compiler.layouts import Candidates, Keep, count_layouts, enumerate_layouts
from shipway.compiler.problem import Problem
from shipway.schemas.plan import Verdict

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Objective = Literal["time", "cost", "memory"]

BATCH = 384
"""Layouts evaluated at a time."""


@dataclass(frozen=True, eq=False)
class Found:
    """What the search saw of a stage."""

    candidates: Candidates
    """Layouts that were evaluated."""
    shared: Tables
    evaluation: Evaluation
    legal: int
    """Legal layouts in all."""
    best: int | None
    """Position of the chosen layout among `candidates`; None when nothing fits."""
    order: Ints
    """Positions that fit, best first."""


def search(problem: Problem, *, prune: bool = True) -> Found | None:
    """The best layout of a stage; None when the constraints leave no legal layout.

    Without `prune` every legal layout is evaluated (what tests hold the search against).
    """
    legal = count_layouts(problem.space)
    if legal == 0:
        return None
    capacity = float(problem.capacity_bytes)
    candidates = enumerate_layouts(problem.space, _may_fit(problem) if prune else None)
    if prune and len(candidates) == 0:
        # Nothing can fit: keep what needs least, to say by how much it misses.
        candidates = _least_demanding(problem)
    shared = tables(problem, candidates)
    seconds = bounds.layout_seconds(problem, candidates, shared)
    least = bounds.layout_bytes(problem, candidates, shared)
    order = np.argsort(_objective(problem, candidates, seconds, least), kind="stable")
    if prune:
        fitting = order[least[order] <= capacity]
        order = fitting if len(fitting) else order[np.argsort(least[order], kind="stable")][:BATCH]
    return _best_first(problem, candidates, shared, order, seconds, least, legal, prune)


def _objective(problem: Problem, candidates: Candidates, seconds: Floats, peak: Floats) -> Floats:
    match problem.blueprint.training.objective:
        case "time":
            return seconds
        case "cost":
            return seconds * candidates.world
        case "memory":
            return peak


def _best_first(
    problem: Problem,
    candidates: Candidates,
    shared: Tables,
    order: Ints,
    seconds: Floats,
    least: Floats,
    legal: int,
    prune: bool,
) -> Found:
    promise = _objective(problem, candidates, seconds, least)[order]
    done: list[Evaluation] = []
    best, evaluated = np.inf, 0
    while evaluated < len(order) and (not prune or promise[evaluated] < best):
        batch = order[evaluated : evaluated + BATCH]
        result = evaluate(problem, candidates.take(batch), _view(shared, batch))
        fits = verdict_rank(result.peak_bytes, result.upper_bytes, problem.capacity_bytes) == 0
        value = _objective(problem, candidates.take(batch), result.step_seconds, result.peak_bytes)
        if fits.any():
            best = min(best, float(value[fits].min()))
        done.append(result)
        evaluated += len(batch)
    seen = order[:evaluated]
    result = _joined(done)
    chosen = candidates.take(seen)
    rank = verdict_rank(result.peak_bytes, result.upper_bytes, problem.capacity_bytes)
    value = _objective(problem, chosen, result.step_seconds, result.peak_bytes)
    # Of equals prefer less memory, then the order of enumeration: the same plan every time.
    ranking = np.lexsort((np.arange(len(value)), result.peak_bytes, value, rank))
    fitting = ranking[rank[ranking] < 2]
    return Found(
        candidates=chosen,
        shared=_view(shared, seen),
        evaluation=result,
        legal=legal,
        best=int(fitting[0]) if len(fitting) else None,
        order=fitting,
    )


def verdict_rank(peak: Floats, upper: Floats, capacity: int) -> npt.NDArray[np.int64]:
    """0 fits, 1 tight, 2 does not fit."""
    return np.where(upper <= capacity, 0, np.where(peak <= capacity, 1, 2))


def verdict(peak_bytes: float, upper_bytes: float, capacity: int) -> Verdict:
    """Fits: even the upper bound does. Tight: only the point estimate does."""
    if upper_bytes <= capacity:
        return "fits"
    return "tight" if peak_bytes <= capacity else "does not fit"


def _view(shared: Tables, index: Ints) -> Tables:
    return Tables(
        shared.cells,
        shared.cell_of[index],
        shared.parts,
        shared.shardings,
        shared.sharding_of[index],
        shared.states,
        shared.sizes,
        shared.cuts,
    )


def _joined(parts: list[Evaluation]) -> Evaluation:
    return Evaluation(
        np.concatenate([part.step_seconds for part in parts]),
        np.concatenate([part.peak_bytes for part in parts]),
        np.concatenate([part.upper_bytes for part in parts]),
        (),
    )


def _may_fit(problem: Problem) -> Keep:
    """Rules meshes out whose states, then whose least activations, cannot fit."""

    def keep(partial: Candidates) -> npt.NDArray[np.bool_]:
        return bounds.mesh_bytes(problem, partial) <= problem.capacity_bytes

    return keep


def _least_demanding(problem: Problem) -> Candidates:
    """When no layout can fit: those whose bound is lowest."""

    def keep(partial: Candidates) -> npt.NDArray[np.bool_]:
        need = bounds.mesh_bytes(problem, partial)
        few = min(20, len(need) - 1)
        return need <= np.partition(need, few)[few]

    return enumerate_layouts(problem.space, keep)
