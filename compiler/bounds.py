"""Lower bounds of memory and time that need no cut of the model: what lets the search skip layouts soundly.

Every bound holds for any way of dividing layers among pipeline ranks: the worst rank is at least the
average one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler.evaluate import Tables, cells_of, outside_bytes
from shipway.compiler.evaluate_states import Shardings, StateCosts, element_bytes, state_costs
from shipway.compiler.layouts import Candidates
from shipway.compiler.memory import ALLOCATOR_SLACK_BYTES
from shipway.compiler.problem import Problem
from shipway.compiler.workload import FIRST, LAST

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def state_bytes(problem: Problem, candidates: Candidates, states: StateCosts, which: Ints) -> Floats:
    """Least memory of the worst rank for parameters, gradients and optimizer alone, allocated."""
    sizes = element_bytes(problem.blueprint.training)
    totals = problem.work.totals.astype(float)

    def average(per_row: Floats) -> Floats:
        result: Floats = (totals @ per_row)[which] / candidates.pp
        return result

    shard = average(states.shard_numel)
    kept = shard * sizes.master
    kept = kept + (2 * average(states.adamw_numel) + average(states.muon_numel)) * sizes.moment
    optimizer = kept + shard * sizes.master
    active = problem.space.capability.active_stages_gathered / problem.space.capability.virtual_stages
    piped = kept + average(states.whole_numel) * sizes.gradient + average(states.gathered_bytes) * active
    alone = kept + states.gathered_bytes.max(axis=0)[which]
    result: Floats = np.maximum(optimizer, np.where(candidates.pp > 1, piped, alone))
    return result


def activation_bytes(problem: Problem, candidates: Candidates, saved: Floats) -> Floats:
    """Least kept activations of the worst rank: rank r holds min(pp - r, m) micro-batches, and every
    rank has a layer. `saved` has shape [rows, layouts]."""
    totals = problem.work.totals.astype(float)
    pp, count = candidates.pp, candidates.micro_batches
    once = totals @ saved / pp
    lightest = saved[1:LAST].min(axis=0) if len(problem.work.rows) > 2 else 0.0
    more = np.minimum((pp + 1) / 2, count) - 1
    result: Floats = once + np.maximum(more, 0) * lightest
    return result


def peak_bytes(problem: Problem, allocated: Floats, candidates: Candidates) -> Floats:
    """What a device must have at least for `allocated` bytes of tensors."""
    outside = sum(outside_bytes(problem, candidates).values(), np.zeros(len(candidates)))
    return allocated * problem.machine.efficiency.fragmentation + ALLOCATOR_SLACK_BYTES + outside


def states_of(problem: Problem, candidates: Candidates) -> tuple[StateCosts, Ints]:
    """Tables of states for meshes that have none yet."""
    c = candidates
    region = c.shard * c.cp * c.tp
    rows, which = np.unique(
        np.column_stack([c.tp, c.ep, c.shard * c.cp, region // c.ep]), axis=0, return_inverse=True
    )
    states = state_costs(problem.work, Shardings(*rows.T), problem.network, problem.blueprint.training)
    return states, which.reshape(-1)


def mesh_bytes(problem: Problem, candidates: Candidates) -> Floats:
    """Least peak memory of meshes: states alone, with the least activations once micro-batches are known."""
    states, which = states_of(problem, candidates)
    least = state_bytes(problem, candidates, states, which)
    if candidates.micro_batch.any():
        saved = least_saved(problem, candidates)
        backward = kept_bytes(problem, candidates, states, which)
        least = np.maximum(least, backward + activation_bytes(problem, candidates, saved))
    return peak_bytes(problem, least, candidates)


def least_saved(problem: Problem, candidates: Candidates) -> Floats:
    """Kept bytes of each row and mesh under the policy that keeps least: [rows, layouts]."""
    c = candidates
    rows, which = np.unique(np.column_stack([c.micro_batch, c.cp, c.tp, c.ep]), axis=0, return_inverse=True)
    shard = cells_of(problem, rows).shard(problem.machine.element_bytes, problem.fused)
    pinned = problem.space.constraints.recompute
    policies = [pinned] if pinned else list(problem.space.capability.recompute)
    result = np.empty((len(problem.work.rows), len(rows)))
    for index, row in enumerate(problem.work.rows):
        names = policies if row.recomputable else ["none"]
        kept = [sum((part.saved_bytes(shard, name) for part in row.parts), 0.0) for name in names]
        result[index] = np.min(np.broadcast_arrays(*kept), axis=0) if len(kept) > 1 else kept[0]
    return result[:, which.reshape(-1)]


def kept_bytes(problem: Problem, candidates: Candidates, states: StateCosts, which: Ints) -> Floats:
    """States of the average rank that are alive in backward, beside activations."""
    sizes = element_bytes(problem.blueprint.training)
    totals = problem.work.totals.astype(float)

    def average(per_row: Floats) -> Floats:
        result: Floats = (totals @ per_row)[which] / candidates.pp
        return result

    kept = average(states.shard_numel) * sizes.master
    kept = kept + (2 * average(states.adamw_numel) + average(states.muon_numel)) * sizes.moment
    whole = average(states.whole_numel) * sizes.gradient
    return kept + np.where(candidates.pp > 1, whole, 0.0)


def layout_bytes(problem: Problem, candidates: Candidates, shared: Tables) -> Floats:
    """Least peak memory of complete layouts."""
    saved = shared.parts.saved[candidates.recompute, :, shared.cell_of].T
    states = state_bytes(problem, candidates, shared.states, shared.sharding_of)
    backward = kept_bytes(problem, candidates, shared.states, shared.sharding_of)
    backward = backward + activation_bytes(problem, candidates, saved)
    return peak_bytes(problem, np.maximum(states, backward), candidates)


def layout_seconds(problem: Problem, candidates: Candidates, shared: Tables) -> Floats:
    """Least step time of complete layouts: a perfect cut, nothing exposed but what no cut can hide."""
    parts, cell = shared.parts, shared.cell_of
    both = parts.forward[:, cell] + parts.backward[candidates.recompute, :, cell].T
    total = problem.work.totals.astype(float) @ both
    pp, virtual, count = candidates.pp, candidates.virtual, candidates.micro_batches
    single = total + (count - 1) * np.maximum(total / pp, both.max(axis=0))
    interleaved = count * total / pp + (pp - 1) * both[1:LAST].min(axis=0)
    result: Floats = np.where(virtual == 1, np.where(pp == 1, count * total, single), interleaved)
    edges = shared.states.gather_seconds[FIRST] + shared.states.reduce_seconds[FIRST]
    return result + np.where(pp == 1, count * edges[shared.sharding_of], 0.0)
