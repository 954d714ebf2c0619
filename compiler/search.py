"""Find a stage's best layout: complete over the legal space, best first, with sound pruning.

Layouts that differ only in how widely they shard states share a core. Cores are ordered by a lower bound
of the objective; in that order they are cut and bounded again, more tightly, and those that may still win
are evaluated in all their splits. The search ends when the best that fits is no worse than the next
bound. What cannot fit by a lower bound is never evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from shipway.compiler import bounds
from shipway.compiler.evaluate import Evaluation, evaluate
from shipway.compiler.evaluate_cores import least_bytes, least_seconds
from shipway.compiler.frozen import frozen
from shipway.compiler.host_memory import host_capacity
from shipway.compiler.layouts import (
    Candidates,
    Keep,
    count_layouts,
    enumerate_layouts,
    joined,
    sort_keys,
    splits,
)
from shipway.compiler.problem import Problem
from shipway.compiler.tables import Tables, tables, with_splits
from shipway.compiler.unique import distinct
from shipway.schemas.plan import Verdict

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Objective = Literal["time", "cost", "memory"]

CORES = 1536
"""Cores bounded at a time."""
BOUNDED = 128
"""Of these, cores whose memory is bounded at a time."""
EXPANDED = 48
"""Cores whose splits are evaluated at a time."""
IN_SEQUENCES = 16
"""Layouts of each stage that sequences of stages are made of: the best ones."""
SURE = 5
"""Layouts that are surely the best: the chosen one and the runners-up that a plan names..."""
FAR = 1.25
"""...as far as they are no further from the best than this."""
MARGIN = 1.01
"""All whose bound is this close to the best are evaluated too."""


@frozen(eq=False)
class Found:
    """What the search saw of a stage."""

    candidates: Candidates
    """Layouts that were evaluated; after `for_sequences` a few of them."""
    batches: tuple[tuple[int, Tables], ...]
    """For each batch in which they were: how many layouts, and their tables."""
    step_seconds: Floats
    peak_bytes: Floats
    upper_bytes: Floats
    node_bytes: Floats
    """Host memory of the fullest node, where something is offloaded."""
    legal: int
    """Legal layouts in all."""
    best: int | None
    """Position of the chosen layout among `candidates`; None when nothing fits."""
    order: Ints
    """Positions that fit, best first."""

    def for_sequences(self, capacity: int) -> Found:
        """The same with the few that a plan chooses among and names: a hundredth of the size.

        These are the best, and the fastest of those that may need more than `capacity` bytes.
        """
        if self.best is None:
            return self
        best = self.order[:IN_SEQUENCES]
        needy = np.flatnonzero(self.upper_bytes > capacity)
        needy = needy[np.argsort(self.step_seconds[needy], kind="stable")][:IN_SEQUENCES]
        kept = np.array(distinct(np.concatenate([best, needy])))
        place = np.searchsorted(kept, best)
        return Found(
            candidates=self.candidates.take(kept),
            batches=tuple(self._batches_of(kept)),
            step_seconds=self.step_seconds[kept],
            peak_bytes=self.peak_bytes[kept],
            upper_bytes=self.upper_bytes[kept],
            node_bytes=self.node_bytes[kept],
            legal=self.legal,
            best=int(place[0]),
            order=place,
        )

    def _batches_of(self, kept: Ints) -> Iterator[tuple[int, Tables]]:
        """The batches with some of the layouts alone, which are given in rising order."""
        first = 0
        for size, shared in self.batches:
            own = kept[(first <= kept) & (kept < first + size)] - first
            if len(own):
                yield len(own), shared.only(own)
            first += size

    def tables_of(self, layout: int) -> Tables:
        """Tables of one evaluated layout alone."""
        for size, shared in self.batches:
            if layout < size:
                return shared.only(np.array([layout]))
            layout -= size
        raise IndexError("no such layout")


Seen = tuple[Candidates, Evaluation, Tables]


def search(problem: Problem) -> Found | None:
    """The best layout of a stage; None when the constraints leave no legal layout."""
    legal = count_layouts(problem.space)
    if legal == 0:
        return None
    cores = enumerate_layouts(problem.space, _may_fit(problem), widest=True)
    if len(cores) == 0:
        # Nothing can fit: look at what needs least, to say by how much it misses.
        cores = enumerate_layouts(problem.space, _least_demanding(problem), widest=True)
    shared = tables(problem, cores)
    least = bounds.layout_bytes(problem, cores, shared)
    possible = np.flatnonzero(least <= problem.capacity_bytes)
    if len(possible) == 0:
        nearest = np.argsort(least, kind="stable")[:EXPANDED]
        return _found(problem, legal, [_expand(problem, cores.take(nearest), shared.take(nearest))])
    cores, shared = cores.take(possible), shared.take(possible)
    seconds = bounds.layout_seconds(problem, cores, shared)
    promise = _objective(problem, cores, seconds, least[possible])
    order = np.argsort(promise, kind="stable")
    return _found(problem, legal, _best_first(problem, cores, shared, order, promise))


def exhaustive(problem: Problem) -> Found | None:
    """Every legal layout evaluated, without bounds: what tests hold `search` against."""
    candidates = enumerate_layouts(problem.space)
    if len(candidates) == 0:
        return None
    shared = tables(problem, candidates)
    result = evaluate(problem, candidates, shared)
    return _found(problem, len(candidates), [(candidates, result, shared)])


def _objective(problem: Problem, candidates: Candidates, seconds: Floats, peak: Floats) -> Floats:
    match problem.blueprint.training.objective:
        case "time":
            return seconds
        case "cost":
            return seconds * candidates.world
        case "memory":
            return peak


def _best_first(
    problem: Problem, cores: Candidates, shared: Tables, order: Ints, promise: Floats
) -> list[Seen]:
    """Evaluate in the order of the bounds until no bound beats the best that fits."""
    seen: list[Seen] = []
    best, done = np.full(SURE, np.inf), 0  # the best few that fit, in rising order
    need = np.full(len(cores), np.inf)
    while done < len(order) and promise[order[done]] < _limit(best):
        batch = order[done : done + CORES]
        done += CORES
        batch = batch[promise[batch] < _limit(best)]
        queue = _Queue(problem, cores.take(batch), shared.take(batch))
        while len(some := queue.next(_limit(best))):
            candidates, result, split = _expand(problem, *queue.cut(some))
            fits = ranks(problem, result.peak_bytes, result.upper_bytes, result.node_bytes) == 0
            reached = _objective(problem, candidates, result.step_seconds, result.peak_bytes)
            best = np.sort(np.append(best, reached[fits]))[:SURE]
            seen.append((candidates, result, split))
        need[batch] = queue.need
    if not seen:
        known = order[np.isfinite(need[order])]
        nearest = known[np.argsort(need[known], kind="stable")[:EXPANDED]]
        seen.append(_expand(problem, cores.take(nearest), shared.take(nearest)))
    return seen


def _limit(best: Floats) -> float:
    """Bounds below this may still belong to a layout that a plan names."""
    return float(np.clip(best[-1], best[0] * MARGIN, best[0] * FAR))


class _Queue:
    """A batch of cores that may fit, cut, by a tighter bound of the objective, the lowest first.

    Memory takes longer to bound than time: where the objective doesn't ask for it, that is done for a few
    cores at a time, as far as the queue is asked for. `need` notes what cores need at least.
    """

    def __init__(self, problem: Problem, cores: Candidates, shared: Tables) -> None:
        self.problem, self.cores, self.shared = problem, cores, shared.cut(cores)
        self.need = np.full(len(cores), np.inf)
        every = np.arange(len(cores))
        seconds = least_seconds(problem, cores, self.shared)
        by_memory = problem.blueprint.training.objective == "memory"
        self.value = _objective(problem, cores, seconds, self._bound(every) if by_memory else seconds)
        every = every[np.argsort(self.value, kind="stable")]
        self.ready = every[self.need[every] <= problem.capacity_bytes] if by_memory else every[:0]
        self.unbounded = every[:0] if by_memory else every

    def next(self, limit: float) -> Ints:
        """The next few, all of a value below `limit`; empty when there are none left."""
        while len(self.ready) < EXPANDED and len(self.unbounded):
            some, self.unbounded = self.unbounded[:BOUNDED], self.unbounded[BOUNDED:]
            some = some[self.value[some] < limit]
            if len(some) == 0:
                break
            self.ready = np.append(self.ready, some[self._bound(some) <= self.problem.capacity_bytes])
        few, self.ready = self.ready[:EXPANDED], self.ready[EXPANDED:]
        return few[self.value[few] < limit]

    def cut(self, some: Ints) -> tuple[Candidates, Tables]:
        """Some of the cores, and their tables."""
        return self.cores.take(some), self.shared.take(some)

    def _bound(self, some: Ints) -> Floats:
        """Least bytes of some cores."""
        self.need[some] = least = least_bytes(self.problem, *self.cut(some))
        return least


def _expand(problem: Problem, cores: Candidates, shared: Tables) -> Seen:
    """Evaluate all layouts that some cores stand for."""
    candidates, core = splits(problem.space, cores)
    split = with_splits(problem, shared, candidates, core)
    return candidates, evaluate(problem, candidates, split), split


def _found(problem: Problem, legal: int, seen: list[Seen]) -> Found:
    candidates = joined([candidates for candidates, _, _ in seen])
    step = np.concatenate([result.step_seconds for _, result, _ in seen])
    peak = np.concatenate([result.peak_bytes for _, result, _ in seen])
    upper = np.concatenate([result.upper_bytes for _, result, _ in seen])
    node = np.concatenate([result.node_bytes for _, result, _ in seen])
    rank = ranks(problem, peak, upper, node)
    value = _objective(problem, candidates, step, peak)
    # Of equals prefer less memory, then the simpler layout: the same plan every time.
    ranking = np.lexsort((*sort_keys(candidates), peak, value, rank))
    fitting = ranking[rank[ranking] < 2]
    return Found(
        candidates=candidates,
        batches=tuple((len(some), shared) for some, _, shared in seen),
        step_seconds=step,
        peak_bytes=peak,
        upper_bytes=upper,
        node_bytes=node,
        legal=legal,
        best=int(fitting[0]) if len(fitting) else None,
        order=fitting,
    )


def merit(problem: Problem, found: Found) -> tuple[int, float]:
    """What the best layout of searches is told by, least first: its verdict, then the objective."""
    best = found.best
    assert best is not None
    one = found.candidates.take(np.array([best]))
    value = _objective(problem, one, found.step_seconds[[best]], found.peak_bytes[[best]])
    rank = ranks(problem, found.peak_bytes[[best]], found.upper_bytes[[best]], found.node_bytes[[best]])
    return int(rank[0]), float(value[0])


def ranks(problem: Problem, peak: Floats, upper: Floats, node: Floats) -> npt.NDArray[np.int64]:
    """The device's verdict as a number, and 2 where host memory is too small."""
    rank = verdict_rank(peak, upper, problem.capacity_bytes)
    return np.where(node > host_capacity(problem), 2, rank)


def verdict_rank(peak: Floats, upper: Floats, capacity: int) -> npt.NDArray[np.int64]:
    """0 fits, 1 tight, 2 does not fit."""
    return np.where(upper <= capacity, 0, np.where(peak <= capacity, 1, 2))


def verdict(peak_bytes: float, upper_bytes: float, capacity: int) -> Verdict:
    """Fits: even the upper bound does. Tight: only the point estimate does."""
    if upper_bytes <= capacity:
        return "fits"
    return "tight" if peak_bytes <= capacity else "does not fit"


def _may_fit(problem: Problem) -> Keep:
    """Rules meshes out whose states, then whose least activations, cannot fit."""

    def keep(partial: Candidates) -> npt.NDArray[np.bool_]:
        return bounds.mesh_bytes(problem, partial) <= problem.capacity_bytes

    return keep


def _least_demanding(problem: Problem) -> Keep:
    """Keeps the few meshes whose bound is lowest: the nearest misses, when no layout can fit."""

    def keep(partial: Candidates) -> npt.NDArray[np.bool_]:
        need = bounds.mesh_bytes(problem, partial)
        few = min(20, len(need) - 1)
        result: npt.NDArray[np.bool_] = need <= np.partition(need, few)[few]
        return result

    return keep
