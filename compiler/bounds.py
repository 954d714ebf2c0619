"""Lower bounds of memory and time that need no cut of the model: what lets the search skip layouts soundly.

A bound holds for every layout that shards states no more widely than the one it is asked about, and for
the balanced cut: the worst rank is at least the average one; each rank has a layer; and each chunk but
the first, which the cut fills up to the bottleneck, lacks less than one layer of it (see `cut`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shipway.compiler.evaluate_states import Bytes, StateCosts, state_costs
from shipway.compiler.layouts import Candidates
from shipway.compiler.memory import ALLOCATOR_SLACK_BYTES
from shipway.compiler.problem import Problem
from shipway.compiler.step_time import copied_bytes, hand_over_seconds, seconds_to_update
from shipway.compiler.tables import Tables, cells_of, shardings_of
from shipway.compiler.unique import distinct, unique_rows
from shipway.compiler.workload import FIRST, LAST, Workload
from shipway.schemas.layout import ACTIVATION_OFFLOAD

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def mesh_bytes(problem: Problem, candidates: Candidates) -> Floats:
    """Least peak memory of meshes: states alone, with the least activations once micro-batches are known."""
    shardings, which = shardings_of(candidates)
    states = state_costs(
        problem.parameters, shardings, problem.network, problem.blueprint.training, seconds=False
    )
    sizes = problem.sizes
    least = _least_states(problem, candidates, states, which, sizes)
    if candidates.micro_batch.any():
        saved, cell = _least_saved(problem, candidates)
        backward = _alive_in_backward(problem, candidates, states, which, sizes)
        backward = backward + (problem.work.totals @ saved)[cell] / candidates.pp
        tokens = candidates.micro_batch * problem.space.context / (candidates.cp * candidates.tp)
        hidden = tokens * problem.work.width * problem.machine.element_bytes
        least = np.maximum(least, backward + _average_buffers(problem, candidates, hidden))
    return peak(problem, least, candidates)


def layout_bytes(problem: Problem, candidates: Candidates, shared: Tables) -> Floats:
    """Least peak memory of layouts whose costs are tabled."""
    c, states, which, sizes = candidates, shared.states, shared.sharding_of, shared.sizes
    least = _least_states(problem, c, states, which, sizes)
    (saved,) = _per_layout(c, shared.cell_of, problem.work.totals @ shared.parts.saved)
    backward = _alive_in_backward(problem, c, states, which, sizes)
    # Without a pipeline activations are freed before a layer's temporaries are made.
    has_backward = (c.pp > 1) & (c.v_schedule == 0)
    lightest = np.where(has_backward, shared.parts.lightest[c.recompute, shared.cell_of], 0.0)
    average = backward + saved / c.pp + lightest
    average = average + _average_buffers(problem, c, shared.parts.hidden[shared.cell_of])
    second = _second_rank(problem, c, shared) + lightest
    return peak(problem, np.maximum(least, np.maximum(average, second)), c)


def layout_seconds(problem: Problem, candidates: Candidates, shared: Tables) -> Floats:
    """Least step time: a perfect cut of whole layers, nothing exposed but what no cut can hide, and what is
    beside the passes."""
    parts, work, c = shared.parts, problem.work, candidates
    per_row = parts.forward[None] + parts.backward
    ends = np.maximum(
        per_row[:, FIRST] + per_row[:, work.layer_rows[0]], per_row[:, LAST] + per_row[:, work.layer_rows[-1]]
    )
    total, lightest, ends = _per_layout(
        c, shared.cell_of, work.totals @ per_row, per_row[:, 1:LAST].min(axis=1), ends
    )
    passed = (c.pp - 1) * 2 * _send_seconds(problem, c, shared)
    busiest = np.maximum(total / c.pp, -(-work.layers // c.pp) * lightest)
    busiest = np.maximum(busiest, ends + (c.virtual - 1) * lightest)
    for rows in _alike(work, per_row):
        # Some rank has at least the average number of such layers, and a layer in each of its chunks.
        most = -(-work.totals[rows].sum() // c.pp)
        (seconds,) = _per_layout(c, shared.cell_of, per_row[:, rows].min(axis=1))
        busiest = np.maximum(busiest, most * seconds + np.maximum(c.virtual - most, 0) * lightest)
    steady = c.micro_batches * busiest
    single = total + (c.micro_batches - 1) * np.maximum(busiest, (total + passed) / c.pp) + passed
    interleaved = steady + (c.pp - 1) * lightest + passed
    several = np.where(c.v_schedule > 0, steady, interleaved)
    passes = np.where(c.virtual == 1, np.where(c.pp == 1, c.micro_batches * total, single), several)
    return passes + beside_passes(problem, c, shared)


def beside_passes(problem: Problem, c: Candidates, shared: Tables) -> Floats:
    """Least seconds of a step beside its passes: FSDP's copies and the update of the average rank.

    ZeRO 1 copies least often, and no narrower sharding leaves a rank less to update.
    """
    totals, states, which = problem.work.totals, shared.states, shared.sharding_of
    whole, adamw, muon, work = (
        (totals @ per_row)[which] / c.pp
        for per_row in (states.whole_numel, states.adamw_numel, states.muon_numel, states.muon_flops)
    )
    times, each = copied_bytes(replace(c, zero=np.ones_like(c.zero)), shared.sizes)
    elementwise, products = seconds_to_update(problem, shared.sizes, adamw, muon, work)
    seconds: Floats = problem.machine.memory_seconds(whole * times * each) + elementwise + products
    return seconds


def _alike(work: Workload, per_row: Floats) -> list[Ints]:
    """Rows of layers in sets of about equal cost; any sets give a bound, these a good one."""
    rows = work.layer_kinds
    cost = per_row[:, rows].mean(axis=(0, 2))
    order = np.argsort(cost)
    jumps = np.flatnonzero(cost[order][1:] > 1.1 * cost[order][:-1]) + 1
    return np.split(rows[order], jumps)


def _send_seconds(problem: Problem, c: Candidates, shared: Tables) -> Floats:
    """Least time of the largest hand-over: the last chunk starts at layer chunks - 1 or later."""
    arriving = _least_arriving(problem.work)[c.chunks - 1]
    return hand_over_seconds(problem, c, arriving * shared.parts.hidden[shared.cell_of])


def _least_arriving(work: Workload) -> Ints:
    """Fewest hidden states that a chunk receives which starts at each layer or later, [layers]."""
    least: Ints = np.minimum.accumulate(work.states_before[: work.layers][::-1])[::-1]
    return least


def _per_layout(candidates: Candidates, cell: Ints, *tables: Floats) -> tuple[Floats, ...]:
    """Entries of [policies, cells] tables for each layout."""
    return tuple(table[candidates.recompute, cell] for table in tables)


def _second_rank(problem: Problem, c: Candidates, shared: Tables) -> Floats:
    """Least memory of pipeline rank 1, which holds the second most micro-batches; 0 without a pipeline.

    Its chunks hold at least the average chunk's seconds less one layer's; what they keep per second is
    at least what the thriftiest of the layers behind the first keeps.
    """
    work, parts, cell = problem.work, shared.parts, shared.cell_of
    if work.layers < 2 or not (c.pp > 1).any():
        return np.zeros(len(c))
    rows = np.array(distinct(work.layer_rows[1:]))
    per_row = parts.forward[None] + parts.backward
    (total, heaviest, lightest) = _per_layout(
        c, cell, work.totals @ per_row, per_row[:, rows].max(axis=1), per_row[:, rows].min(axis=1)
    )
    seconds = np.maximum(total / c.chunks - heaviest, lightest)
    ratio_saved = (parts.saved[:, rows] / per_row[:, rows]).min(axis=1)[c.recompute, cell]
    warm = np.where(
        c.virtual == 1,
        np.minimum(c.pp - 1, c.micro_batches),
        np.minimum((c.virtual - 1) * c.pp + 2 * (c.pp - 2) + 1, c.micro_batches * c.virtual),
    )
    # V-shaped: forwards of its first chunk before anything comes back to it.
    warm = np.where(c.v_schedule > 0, np.minimum(2 * c.pp - 3, c.micro_batches), warm)
    activations = warm * seconds * ratio_saved
    states, sizes = shared.states, shared.sizes
    each = states.whole_numel[rows] * sizes.gradient + _kept_per_row(states, sizes)[rows]
    layers = np.maximum(np.ceil(total / c.chunks / heaviest - 1 - 1e-9), 1)
    active = np.minimum(c.virtual, problem.space.capability.active_stages_gathered)
    held = each.min(axis=0)[shared.sharding_of] * c.virtual
    held = layers * (held + states.gathered_bytes[rows].min(axis=0)[shared.sharding_of] * active)
    own_buffers = np.where(c.pp > 2, 2.0, 1.0) * c.virtual * _least_states_received(work)
    buffers = own_buffers * _buffers(problem, c) * shared.parts.hidden[cell]
    return np.where(c.pp > 1, activations + held + buffers, 0.0)


def _least_states_received(work: Workload) -> int:
    """Hidden states that any chunk but the first receives at least."""
    return int(work.states_before[1:].min())


def _buffers(problem: Problem, c: Candidates) -> Ints:
    """Receive buffers of one hand-over."""
    if problem.space.capability.receive_buffers == "per_micro_batch":
        return c.micro_batches
    return np.minimum(c.pp, c.micro_batches)


def _average_buffers(problem: Problem, c: Candidates, hidden: Floats) -> Floats:
    """Receive buffers of the average rank: chunk i starts at layer i or later, where no fewer states
    arrive, and sends as many gradients back."""
    least = _least_arriving(problem.work)
    arriving = np.concatenate([[0, 0], np.cumsum(least[1:])])
    return 2 * arriving[c.chunks] * hidden * _buffers(problem, c) / c.pp


def _kept_per_row(states: StateCosts, sizes: Bytes) -> Floats:
    """Master weights and moments of each row under each sharding."""
    moments = 2 * states.adamw_numel + states.muon_numel
    return states.shard_numel * sizes.weight + moments * sizes.moment_here


def _least_states(problem: Problem, c: Candidates, states: StateCosts, which: Ints, sizes: Bytes) -> Floats:
    """Parameters, gradients and optimizer of the average rank, in backward and at the optimizer's step."""
    totals = problem.work.totals
    kept = (totals @ _kept_per_row(states, sizes))[which] / c.pp
    optimizer = kept + (totals @ states.shard_numel)[which] / c.pp * sizes.master
    whole = totals @ (states.whole_numel * sizes.gradient)
    active = problem.space.capability.active_stages_gathered / problem.space.capability.virtual_stages
    piped = kept + (whole + totals @ states.gathered_bytes * active)[which] / c.pp
    alone = kept + states.gathered_bytes.max(axis=0)[which]
    return np.maximum(optimizer, np.where(c.pp > 1, piped, alone))


def _alive_in_backward(
    problem: Problem, c: Candidates, states: StateCosts, which: Ints, sizes: Bytes
) -> Floats:
    """States of the average rank that are alive beside activations."""
    totals = problem.work.totals
    kept = totals @ _kept_per_row(states, sizes)
    whole = totals @ (states.whole_numel * sizes.gradient)
    return (kept[which] + np.where(c.pp > 1, whole[which], 0.0)) / c.pp


def _least_saved(problem: Problem, candidates: Candidates) -> tuple[Floats, Ints]:
    """Kept bytes of each row in each cell under the thriftiest policy, and each layout's cell."""
    c = candidates
    rows, which = unique_rows(c.micro_batch, c.cp, c.tp, c.ep)
    shard = cells_of(problem, rows).shard(problem.machine, problem.fused)
    pinned = problem.space.constraints.recompute
    thriftiest = pinned or problem.space.capability.recompute[-1]
    moves = problem.space.offload in ACTIVATION_OFFLOAD
    if moves:
        thriftiest = "full"
    result = np.empty((len(problem.work.rows), len(rows)))
    for index, row in enumerate(problem.work.rows):
        policy = thriftiest if row.recomputable else "none"
        result[index] = sum((part.saved_bytes(shard, policy) for part in row.parts), 0.0)
        if moves:
            hidden = shard.local_tokens * problem.work.width * shard.element_bytes
            result[index] -= row.movable_states * hidden
    return result, which


def peak(problem: Problem, allocated: Floats, candidates: Candidates) -> Floats:
    """What a device must have at least for `allocated` bytes of tensors.

    Communicators count at their smallest, and not those of groups that a narrower sharding may do without.
    """
    e, c = problem.machine.efficiency, candidates
    smallest = min(e.communicator_bytes_network, e.communicator_bytes_scale_up)
    groups = (c.tp > 1).astype(float) + (c.cp > 1) + (c.ep > 1) + (c.pp > 1)
    outside = problem.blueprint.cluster.device.context_bytes + e.library_bytes + smallest * groups
    needed: Floats = allocated * e.fragmentation + ALLOCATOR_SLACK_BYTES + outside
    return needed
