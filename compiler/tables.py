"""Costs that the layouts of a stage share, each worked out once.

Layouts share cells (how a micro-batch is cut), shardings (how states are) and cuts of the model: a
million layouts ask the catalogue a few thousand times.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shipway.compiler.cut import RESOLUTION, cuts
from shipway.compiler.delta_context import exchanges_heads
from shipway.compiler.evaluate_parts import POLICIES, Cells, PartCosts, load_imbalance, part_costs
from shipway.compiler.evaluate_states import Bytes, Shardings, StateCosts, state_costs
from shipway.compiler.frozen import frozen
from shipway.compiler.layouts import Candidates
from shipway.compiler.offload import with_activations
from shipway.compiler.problem import Problem
from shipway.compiler.unique import first_rows, unique_rows
from shipway.compiler.workload import FIRST, LAST, Workload
from shipway.schemas.layout import ACTIVATION_OFFLOAD

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CELL_SUMS = ("forward", "backward", "saved", "weight", "waiting", "moved")
"""Running sums that do not depend on the sharding."""


@frozen(eq=False)
class Tables:
    """Costs that the layouts of a stage share, and where each layout finds its own."""

    cells: Cells
    cell_of: Ints
    parts: PartCosts
    shardings: Shardings
    sharding_of: Ints
    states: StateCosts
    sizes: Bytes
    work: Workload
    sums: dict[tuple[str, int], Floats] = field(default_factory=dict)
    """Running sums over layers that have been asked for, see `running`."""
    bounds: Ints | None = None
    """Boundaries of each layout's chunks once they are cut, see `cut_bounds`."""

    @cached_property
    def rounded(self) -> Ints:
        """Seconds of each row in steps of the heaviest layer's, [rows, policies, cells], for cutting."""
        both = (self.parts.forward[None] + self.parts.backward).transpose(1, 0, 2)
        heaviest = both[self.work.layer_kinds].max(axis=0)
        steps: Ints = np.rint(both / heaviest * RESOLUTION).astype(np.int64)
        return steps

    def take(self, index: Ints) -> Tables:
        """The same tables for a selection of layouts."""
        result = replace(
            self,
            cell_of=self.cell_of[index],
            sharding_of=self.sharding_of[index],
            bounds=None if self.bounds is None else self.bounds[index],
        )
        result.__dict__["rounded"] = self.rounded
        return result

    def cut(self, own: Candidates) -> Tables:
        """The same with every layout cut, which those selected from it then are too."""
        result = replace(self, bounds=cut_bounds(self, own))
        result.__dict__["rounded"] = self.rounded
        return result

    def only(self, layouts: Ints) -> Tables:
        """Tables of a selection of layouts, with nothing else in them."""
        cells, cell_of = np.unique(self.cell_of[layouts], return_inverse=True)
        shardings, sharding_of = np.unique(self.sharding_of[layouts], return_inverse=True)
        result = Tables(
            self.cells.take(cells),
            cell_of,
            self.parts.take(cells),
            self.shardings.take(shardings),
            sharding_of,
            self.states.take(shardings),
            self.sizes,
            self.work,
        )
        result.__dict__["rounded"] = self.rounded[:, :, cells]
        return result

    def running(self, name: str, policy: int = 0) -> Floats:
        """Running sums of a quantity over layers: [cells or shardings, layers + 1].

        The first row belongs to the first layer and the last row to the last: the sum between two
        boundaries is a chunk's.
        """
        key = (name, policy)
        held = self.sums.get(key)
        if held is None:
            held = self.sums[key] = _running(self.work, self._per_row(name, policy))
        return held

    def under_each_policy(self, name: str) -> Floats:
        """Running sums of what depends on the policy, [policies x cells, layers + 1]."""
        held = self.sums.get((name, POLICIES))
        if held is None:
            each = [self.running(name, policy) for policy in range(POLICIES)]
            held = self.sums[name, POLICIES] = np.concatenate(each)
        return held

    def _per_row(self, name: str, policy: int) -> Floats:
        match name:
            case "forward" | "weight" | "waiting" | "moved":
                result: Floats = getattr(self.parts, name)
            case "backward" | "saved":
                result = getattr(self.parts, name)[policy]
            case _:
                result = getattr(self.states, name)
        return result


def _running(work: Workload, per_row: Floats) -> Floats:
    layers = per_row[work.layer_rows].T
    result = np.zeros((layers.shape[0], layers.shape[1] + 1))
    result[:, 1:] = layers
    result[:, 1] += per_row[FIRST]
    result[:, -1] += per_row[LAST]
    return np.cumsum(result, axis=1, out=result)


def tables(problem: Problem, candidates: Candidates) -> Tables:
    """Cells and shardings of all candidates, evaluated."""
    c = candidates
    cell_rows, cell_of = unique_rows(c.micro_batch, c.cp, c.tp, c.ep)
    cells = cells_of(problem, cell_rows)
    shardings, sharding_of = shardings_of(c)
    training = problem.blueprint.training
    work, gradient = problem.work, problem.sizes.gradient
    parts = part_costs(work, cells, problem.machine, problem.network, problem.fused, gradient)
    if problem.space.offload in ACTIVATION_OFFLOAD:
        parts = with_activations(parts, problem.work, problem.machine.host_bandwidth)
    return Tables(
        cells=cells,
        cell_of=cell_of,
        parts=parts,
        shardings=shardings,
        sharding_of=sharding_of,
        states=state_costs(problem.parameters, shardings, problem.network, training),
        sizes=problem.sizes,
        work=problem.work,
    )


def shardings_of(candidates: Candidates) -> tuple[Shardings, Ints]:
    """Distinct shardings, and which one each layout has."""
    c = candidates
    region = c.shard * c.cp * c.tp
    rows, which = unique_rows(c.tp, c.ep, c.shard * c.cp, region // c.ep)
    return Shardings(*rows.T), which


def with_splits(problem: Problem, shared: Tables, layouts: Candidates, core: Ints) -> Tables:
    """Tables of layouts that share their cells with cores already tabled."""
    shardings, sharding_of = shardings_of(layouts)
    states = state_costs(problem.parameters, shardings, problem.network, problem.blueprint.training)
    kept = {key: sums for key, sums in shared.sums.items() if key[0] in CELL_SUMS}
    result = replace(
        shared,
        cell_of=shared.cell_of[core],
        shardings=shardings,
        sharding_of=sharding_of,
        states=states,
        sums=kept,
        bounds=None if shared.bounds is None else shared.bounds[core],
    )
    result.__dict__["rounded"] = shared.rounded
    return result


def cells_of(problem: Problem, rows: Ints) -> Cells:
    """Cells from rows of (sequences, cp, tp, ep)."""
    sequences, cp, tp, ep = rows.T
    context = np.full(len(rows), problem.space.context)
    experts = problem.blueprint.model.feed_forward.experts
    local_tokens = sequences * context / (cp * tp)
    percentile = problem.machine.efficiency.load_percentile
    imbalance = load_imbalance(experts, local_tokens, ep, percentile)
    return Cells(context, sequences, cp, tp, ep, imbalance, exchanges_heads(problem, sequences, cp, tp))


def cut_bounds(shared: Tables, own: Candidates) -> Ints:
    """The balanced cut of each layout, [layouts, most chunks + 1], filled up with the number of layers."""
    if shared.bounds is not None:
        return shared.bounds
    # Layouts of one cell, policy and number of chunks are cut alike.
    first, which = first_rows(shared.cell_of, own.recompute, own.chunks)
    costs = shared.rounded[:, own.recompute[first], shared.cell_of[first]]
    layers = costs[shared.work.layer_rows].T
    layers[:, 0] += costs[FIRST]
    layers[:, -1] += costs[LAST]
    spread: Ints = cuts(layers, own.chunks[first])[which]
    return spread
