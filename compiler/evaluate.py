"""Memory and step time of many layouts at once.

Layouts that have the same number of pipeline ranks and chunks are evaluated together; what they share
(cells of a micro-batch, shardings of the states, cuts of the model) is worked out once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shipway.compiler.cut import cut
from shipway.compiler.evaluate_parts import AXES, Cells, PartCosts, load_imbalance, part_costs
from shipway.compiler.evaluate_states import (
    Bytes,
    Shardings,
    StateCosts,
    element_bytes,
    state_costs,
)
from shipway.compiler.fabric import axis_groups, path
from shipway.compiler.layouts import Candidates
from shipway.compiler.memory import (
    ChunkActivations,
    ChunkStates,
    MemoryTerms,
    Peaks,
    by_rank,
    memory_terms,
    peaks,
)
from shipway.compiler.problem import Problem
from shipway.compiler.schedule import pipeline_seconds
from shipway.compiler.timing import CATEGORIES
from shipway.compiler.workload import FIRST, LAST

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tables:
    """Costs that the layouts of a stage share, and where each layout finds its own."""

    cells: Cells
    cell_of: Ints
    parts: PartCosts
    shardings: Shardings
    sharding_of: Ints
    states: StateCosts
    sizes: Bytes
    cuts: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    """Boundaries by (cell, recomputation, chunks)."""


def tables(problem: Problem, candidates: Candidates) -> Tables:
    """Cells and shardings of all candidates, evaluated."""
    c = candidates
    cell_rows, cell_of = np.unique(
        np.column_stack([c.micro_batch, c.cp, c.tp, c.ep]), axis=0, return_inverse=True
    )
    cells = cells_of(problem, cell_rows)
    region = c.shard * c.cp * c.tp
    sharding_rows, sharding_of = np.unique(
        np.column_stack([c.tp, c.ep, c.shard * c.cp, region // c.ep]), axis=0, return_inverse=True
    )
    shardings = Shardings(*sharding_rows.T)
    training = problem.blueprint.training
    return Tables(
        cells=cells,
        cell_of=cell_of.reshape(-1),
        parts=part_costs(problem.work, cells, problem.machine, problem.network, problem.fused),
        shardings=shardings,
        sharding_of=sharding_of.reshape(-1),
        states=state_costs(problem.work, shardings, problem.network, training),
        sizes=element_bytes(training),
    )


def cells_of(problem: Problem, rows: Ints) -> Cells:
    """Cells from rows of (sequences, cp, tp, ep)."""
    sequences, cp, tp, ep = rows.T
    context = np.full(len(rows), problem.space.context)
    experts = problem.blueprint.model.feed_forward.experts
    local_tokens = sequences * context / (cp * tp)
    percentile = problem.machine.efficiency.load_percentile
    return Cells(context, sequences, cp, tp, ep, load_imbalance(experts, local_tokens, ep, percentile))


@dataclass(frozen=True, eq=False)
class Group:
    """Layouts of one pp and one number of chunks, evaluated; arrays over layouts first."""

    pp: int
    chunks: int
    index: Ints
    """Positions among the candidates."""
    bounds: Ints
    """[layouts, chunks + 1]: layer boundaries."""
    counts: Floats
    """[layouts, chunks, rows]."""
    memory: MemoryTerms
    peaks: Peaks
    time: dict[str, Floats]
    """Items that add up to the step; each [layouts]."""
    step_seconds: Floats


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Figures of every candidate."""

    step_seconds: Floats
    peak_bytes: Floats
    upper_bytes: Floats
    groups: tuple[Group, ...]


def evaluate(problem: Problem, candidates: Candidates, shared: Tables) -> Evaluation:
    """Evaluate candidates; `shared` must have been made from the same ones."""
    size = len(candidates)
    step, peak, upper = np.empty(size), np.empty(size), np.empty(size)
    groups = []
    keys = np.column_stack([candidates.pp, candidates.chunks])
    shapes, which = np.unique(keys, axis=0, return_inverse=True)
    for number, (pp, chunks) in enumerate(shapes):
        index = np.flatnonzero(which.reshape(-1) == number)
        group = _evaluate_group(problem, candidates, shared, int(pp), int(chunks), index)
        step[index] = group.step_seconds
        peak[index] = group.peaks.peak.max(axis=1)
        upper[index] = group.peaks.upper.max(axis=1)
        groups.append(group)
    return Evaluation(step, peak, upper, tuple(groups))


def cut_bounds(shared: Tables, problem: Problem, cell: int, recompute: int, chunks: int) -> tuple[int, ...]:
    """The balanced cut for a cell and a recomputation policy."""
    key = (cell, recompute, chunks)
    bounds = shared.cuts.get(key)
    if bounds is None:
        seconds = shared.parts.forward[:, cell] + shared.parts.backward[recompute, :, cell]
        layers = seconds[problem.work.layer_rows].tolist()
        bounds = shared.cuts[key] = cut(layers, chunks, float(seconds[FIRST]), float(seconds[LAST]))
    return bounds


def _evaluate_group(
    problem: Problem, candidates: Candidates, shared: Tables, pp: int, chunks: int, index: Ints
) -> Group:
    own = candidates.take(index)
    cell, sharding = shared.cell_of[index], shared.sharding_of[index]
    bounds = np.array(
        [
            cut_bounds(shared, problem, int(c), int(r), chunks)
            for c, r in zip(cell, own.recompute, strict=True)
        ],
        dtype=np.int64,
    )
    counts = row_counts(problem, bounds)
    chunk = _Chunks(counts)
    states = _chunk_states(chunk, shared.states, sharding)
    activations = _chunk_activations(problem, chunk, shared.parts, cell, own, bounds)
    terms = memory_terms(
        states,
        activations,
        outside_bytes(problem, own),
        pp,
        own.zero,
        own.micro_batches,
        shared.sizes,
        problem.space.capability,
    )
    time = step_time(problem, shared, own, cell, sharding, chunk, activations, states, pp)
    return Group(
        pp=pp,
        chunks=chunks,
        index=index,
        bounds=bounds,
        counts=counts,
        memory=terms,
        peaks=peaks(terms, problem.machine.efficiency),
        time=time,
        step_seconds=sum(time.values(), np.zeros(len(index))),
    )


def row_counts(problem: Problem, bounds: Ints) -> Floats:
    """How often each row occurs in each chunk: [layouts, chunks, rows]."""
    work = problem.work
    ahead = np.zeros((work.layers + 1, len(work.rows)))
    ahead[np.arange(1, work.layers + 1), work.layer_rows] = 1
    ahead = ahead.cumsum(axis=0)
    counts = ahead[bounds[:, 1:]] - ahead[bounds[:, :-1]]
    counts[:, 0, FIRST] = 1
    counts[:, -1, LAST] = 1
    return counts


@dataclass(frozen=True)
class _Chunks:
    counts: Floats

    def sum(self, per_row: Floats) -> Floats:
        """[rows, layouts] summed over the rows of each chunk: [layouts, chunks]."""
        result: Floats = np.matmul(self.counts, per_row.T[:, :, None])[..., 0]
        return result

    def max(self, per_row: Floats) -> Floats:
        """[rows, layouts], largest over the rows that a chunk has."""
        present = self.counts > 0
        result: Floats = np.where(present, per_row.T[:, None, :], 0.0).max(axis=2)
        return result


def _chunk_states(chunk: _Chunks, states: StateCosts, sharding: Ints) -> ChunkStates:
    return ChunkStates(
        gathered_bytes=chunk.sum(states.gathered_bytes[:, sharding]),
        whole_numel=chunk.sum(states.whole_numel[:, sharding]),
        shard_numel=chunk.sum(states.shard_numel[:, sharding]),
        adamw_numel=chunk.sum(states.adamw_numel[:, sharding]),
        muon_numel=chunk.sum(states.muon_numel[:, sharding]),
        largest_row_gathered=chunk.max(states.gathered_bytes[:, sharding]),
        largest_row_numel=chunk.max(states.whole_numel[:, sharding]),
        largest_matrix=chunk.max(states.largest_matrix[:, sharding]),
    )


def _chunk_activations(
    problem: Problem, chunk: _Chunks, parts: PartCosts, cell: Ints, own: Candidates, bounds: Ints
) -> ChunkActivations:
    saved = parts.saved[own.recompute, :, cell].T
    temporary = parts.scratch[:, cell] + parts.overhead[own.recompute, :, cell].T
    hidden = parts.hidden[cell]
    states = problem.work.states_before[bounds] * hidden[:, None]
    received, returned = states[:, :-1].copy(), states[:, 1:].copy()
    received[:, 0] = 0.0
    returned[:, -1] = 0.0
    return ChunkActivations(chunk.sum(saved), chunk.max(temporary), received, returned, hidden)


def outside_bytes(problem: Problem, own: Candidates) -> dict[str, Floats]:
    """Memory outside the allocator: context, libraries, one communicator per group larger than one rank."""
    e = problem.machine.efficiency
    groups = axis_groups(own.pp, own.replicate, own.shard, own.cp, own.tp, own.ep)
    groups["world"] = (own.world, np.ones_like(own.world))
    communicators = np.zeros(len(own))
    for size, stride in groups.values():
        far = path(problem.network.fabric, size, stride).crosses_network
        each = np.where(far, e.communicator_bytes_network, e.communicator_bytes_scale_up)
        communicators += np.where(size > 1, each, 0)
    return {
        "device context": np.full(len(own), float(problem.blueprint.cluster.device.context_bytes)),
        "libraries and kernels' modules": np.full(len(own), float(e.library_bytes)),
        "communicators": communicators,
    }


def step_time(
    problem: Problem,
    shared: Tables,
    own: Candidates,
    cell: Ints,
    sharding: Ints,
    chunk: _Chunks,
    activations: ChunkActivations,
    states: ChunkStates,
    pp: int,
) -> dict[str, Floats]:
    """Seconds on the critical path of one optimizer step, by what they are spent on."""
    parts = shared.parts
    forward = chunk.sum(parts.forward[:, cell])
    backward = chunk.sum(parts.backward[own.recompute, :, cell].T)
    send = send_seconds(problem, own, activations, pp)
    passes = pipeline_seconds(forward, backward, send, own.micro_batches, pp)
    busy = by_rank(forward + backward, pp).sum(axis=1)
    busiest = busy.argmax(axis=1)
    time = _busy_items(parts, own, cell, chunk, busiest, pp)
    total_busy = own.micro_batches * busy.max(axis=1)
    time["pipeline bubble and transfers"] = np.maximum(passes - total_busy, 0.0)
    time["parameter gather and gradient reduction, exposed"] = exposed_sharding(
        problem, shared, own, cell, sharding, chunk, backward, pp
    )
    time["optimizer"] = optimizer_seconds(problem, shared, own, sharding, chunk, states, pp)
    time["checkpoints, spread over steps"] = checkpoint_seconds(problem, shared, own, states, pp)
    return time


def _busy_items(
    parts: PartCosts, own: Candidates, cell: Ints, chunk: _Chunks, busiest: Ints, pp: int
) -> dict[str, Floats]:
    """The busiest rank's work by category."""

    def on_busiest(per_row: Floats) -> Floats:
        ranks = by_rank(chunk.sum(per_row), pp).sum(axis=1)
        picked: Floats = np.take_along_axis(ranks, busiest[:, None], axis=1)[:, 0] * own.micro_batches
        return picked

    compute = parts.compute.sum(axis=0)
    items = {name: on_busiest(compute[i][:, cell]) for i, name in enumerate(CATEGORIES)}
    names = {
        "tp": "tensor-parallel collectives",
        "cp": "context-parallel collectives",
        "ep": "expert all-to-all",
    }
    transfer = parts.transfer.sum(axis=0)
    for i, axis in enumerate(AXES):
        items[names[axis]] = on_busiest(transfer[i][:, cell])
    every = parts.forward[:, cell] + parts.backward[own.recompute, :, cell].T
    plain = parts.forward[:, cell] + parts.backward[0][:, cell]
    items["recomputation"] = on_busiest(every - plain)
    items["waiting for the host to issue work"] = on_busiest(parts.host[:, cell])
    known = sum(items.values(), np.zeros(len(own)))
    items["recomputation"] += on_busiest(every) - known
    return items


def send_seconds(problem: Problem, own: Candidates, activations: ChunkActivations, pp: int) -> Floats:
    """Time to pass the largest hand-over of one micro-batch to the next pipeline rank."""
    if pp == 1:
        return np.zeros(len(own))
    size, stride = axis_groups(own.pp, own.replicate, own.shard, own.cp, own.tp, own.ep)["pp"]
    seconds: Floats = problem.network.collective_seconds(
        "send_receive", activations.received.max(axis=1), size, stride
    )
    return seconds


def exposed_sharding(
    problem: Problem,
    shared: Tables,
    own: Candidates,
    cell: Ints,
    sharding: Ints,
    chunk: _Chunks,
    backward: Floats,
    pp: int,
) -> Floats:
    """What FSDP's gathers and reductions add to the step.

    Without a pipeline each micro-batch gathers a row while the one before runs, forward and (ZeRO 3)
    backward, and reduces a row while the next one's backward runs. Under a pipeline parameters are
    gathered once, under the first forward, and gradients reduced once, after a chunk's last backward.
    """
    parts, states = shared.parts, shared.states
    gather, reduce = states.gather_seconds[:, sharding], states.reduce_seconds[:, sharding]
    replicate = replicate_seconds(problem, shared, own, sharding)
    ahead = parts.forward[:, cell]
    if pp == 1:
        behind = parts.backward[own.recompute, :, cell].T
        regather = np.where(own.zero == 3, gather, 0.0)
        each = chunk.sum(np.maximum(gather - ahead, 0) + np.maximum(regather + reduce - behind, 0))[:, 0]
        edges = gather[FIRST] + reduce[FIRST]
        once = chunk.sum(np.maximum(replicate + regather + reduce - behind, 0))[:, 0]
        once -= chunk.sum(np.maximum(regather + reduce - behind, 0))[:, 0]
        return own.micro_batches * (each + edges) + once + replicate[FIRST]
    first = by_rank(chunk.sum(np.maximum(gather - ahead, 0)), pp).sum(axis=1).max(axis=1)
    repeats = _regathers(problem, own, pp, chunk.counts.shape[1] // pp)
    again = by_rank(chunk.sum(np.maximum(gather - ahead, 0)), pp).max(axis=(1, 2)) * repeats
    # A rank's reduction runs while the ranks before it still go backward.
    total = by_rank(chunk.sum(reduce + replicate), pp)
    own_backward = by_rank(backward, pp)[:, 0, :]
    slack = np.cumsum(own_backward, axis=1) - own_backward
    tail = np.maximum(total[:, 0, :] - slack, 0.0).max(axis=1)
    return first + again + tail


def _regathers(problem: Problem, own: Candidates, pp: int, virtual: int) -> Floats:
    """Gathers beyond the first of each chunk: torch keeps only a few chunks of a rank gathered."""
    if virtual <= problem.space.capability.active_stages_gathered:
        return np.zeros(len(own))
    return 2.0 * virtual * np.maximum(own.micro_batches / pp - 1, 0)


def replicate_seconds(problem: Problem, shared: Tables, own: Candidates, sharding: Ints) -> Floats:
    """All-reduce of each row's gradient shard over the replicas: [rows, layouts]."""
    size, stride = axis_groups(own.pp, own.replicate, own.shard, own.cp, own.tp, own.ep)["dp_replicate"]
    shard = shared.states.shard_numel[:, sharding] * shared.sizes.gradient
    seconds: Floats = problem.network.collective_seconds("all_reduce", shard, size, stride)
    return seconds


def optimizer_seconds(
    problem: Problem,
    shared: Tables,
    own: Candidates,
    sharding: Ints,
    chunk: _Chunks,
    states: ChunkStates,
    pp: int,
) -> Floats:
    """Clip, update and orthogonalise on the busiest rank.

    AdamW reads parameter, gradient and two moments and writes three; Muon reads three and writes two,
    and moves each shard of the momentum to its matrix's owner and back in bf16.
    """
    sizes, m = shared.sizes, problem.machine
    adamw, muon = by_rank(states.adamw_numel, pp).sum(axis=1), by_rank(states.muon_numel, pp).sum(axis=1)
    work = by_rank(chunk.sum(shared.states.muon_flops[:, sharding]), pp).sum(axis=1)
    moved = adamw * (3 * sizes.master + 4 * sizes.moment) + muon * (3 * sizes.master + 2 * sizes.moment)
    norm = (adamw + muon) * 2 * sizes.master
    seconds = m.memory_seconds(moved * m.efficiency.eager_elementwise + norm)
    seconds = seconds + work / (m.peak_flops * m.efficiency.orthogonalisation)
    size, stride = axis_groups(own.pp, own.replicate, own.shard, own.cp, own.tp, own.ep)["dp_shard"]
    exchange = problem.network.collective_seconds("all_to_all", muon.max(axis=1) * 2, size, stride)
    result: Floats = seconds.max(axis=1) + 2 * exchange
    return result


def checkpoint_seconds(
    problem: Problem, shared: Tables, own: Candidates, states: ChunkStates, pp: int
) -> Floats:
    """Stall of one save over the steps between saves: the copy to the host, or the whole write."""
    checkpoints, cluster = problem.blueprint.training.checkpoints, problem.blueprint.cluster
    sizes = shared.sizes
    mine = (
        by_rank(states.shard_numel, pp).sum(axis=1) * sizes.master
        + (2 * by_rank(states.adamw_numel, pp).sum(axis=1) + by_rank(states.muon_numel, pp).sum(axis=1))
        * sizes.moment
    )
    stall = mine.max(axis=1) / cluster.device.host_bandwidth
    if not checkpoints.asynchronous:
        replicas = own.replicate
        stall = stall + mine.mean(axis=1) * own.world / replicas / cluster.storage.write_bandwidth
    result: Floats = stall / checkpoints.every_steps
    return result
