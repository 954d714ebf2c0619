"""Memory and step time of many layouts at once.

Layouts that have the same number of pipeline ranks and chunks are evaluated together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler.chunked import Chunked, chunk, groups_of, handed_over
from shipway.compiler.evaluate_parts import AXES
from shipway.compiler.fabric import path
from shipway.compiler.frozen import frozen
from shipway.compiler.host_memory import host_bytes, node_bytes
from shipway.compiler.layer_timeline import (
    LayerMoments,
    layer_activations,
    layer_moments,
    layer_states,
)
from shipway.compiler.layouts import Candidates
from shipway.compiler.memory import (
    ChunkActivations,
    ChunkStates,
    MemoryTerms,
    Peaks,
    at_worst_moment,
    by_rank,
    memory_terms,
    peaks,
)
from shipway.compiler.problem import Problem
from shipway.compiler.step_time import PASSES, TIMES, step_time
from shipway.compiler.tables import Tables
from shipway.compiler.timing import CATEGORIES
from shipway.compiler.v_memory import v_at_worst_moment
from shipway.compiler.workload import FIRST, LAST

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STAGED_STATES = 2
"""Of what goes to the host: the newest two are still leaving; or one is used and the next has come back."""

AXIS_TIME = {
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel collectives",
    "ep": "expert all-to-all",
}


@frozen(eq=False)
class Group:
    """Layouts of one pp and one number of chunks, evaluated; arrays over layouts first."""

    pp: int
    chunks: int
    index: Ints
    """Positions among the candidates."""
    chunked: Chunked
    memory: MemoryTerms
    peaks: Peaks
    host: dict[str, Floats]
    """Host memory of one rank by item, [layouts, ranks]; empty where a layout keeps nothing there."""
    node_bytes: Floats
    """Of the fullest node, [layouts]; 0 likewise."""
    time: dict[str, Floats]
    """Parts that add up to the step; each [layouts]."""
    step_seconds: Floats


@frozen(eq=False)
class Evaluation:
    """Figures of every candidate."""

    step_seconds: Floats
    peak_bytes: Floats
    upper_bytes: Floats
    node_bytes: Floats
    """Host memory of the fullest node; 0 where nothing is offloaded."""
    groups: tuple[Group, ...]


def evaluate(problem: Problem, candidates: Candidates, shared: Tables) -> Evaluation:
    """Evaluate candidates; `shared` must have been made from the same ones."""
    size = len(candidates)
    step, peak, upper, node = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    outside = outside_bytes(problem, candidates)
    groups = []
    for index, chunked in chunk(candidates, shared):
        group = _evaluate_group(problem, chunked, index, outside)
        step[index] = group.step_seconds
        peak[index] = group.peaks.peak.max(axis=1)
        upper[index] = group.peaks.upper.max(axis=1)
        node[index] = group.node_bytes
        groups.append(group)
    return Evaluation(step, peak, upper, node, tuple(groups))


def _evaluate_group(problem: Problem, chunked: Chunked, index: Ints, outside: dict[str, Floats]) -> Group:
    own = chunked.own
    states = _chunk_states(chunked)
    sizes = chunked.shared.sizes
    terms = memory_terms(
        states,
        _chunk_activations(chunked),
        _without_pipeline(chunked) if chunked.pp == 1 else None,
        {name: each[index] for name, each in outside.items()},
        chunked.pp,
        own.micro_batches,
        sizes,
        problem.space.capability,
        problem.fused,
    )
    host: dict[str, Floats] = {}
    node = np.zeros(len(index))
    if problem.space.offload != "none":
        host = host_bytes(problem, chunked, states)
        node = node_bytes(problem, chunked, sum(host.values(), np.zeros((len(index), chunked.pp))))
    time = step_time(problem, chunked, states)
    return Group(
        pp=chunked.pp,
        chunks=chunked.bounds.shape[1] - 1,
        index=index,
        chunked=chunked,
        memory=terms,
        peaks=peaks(terms, problem.machine.efficiency, problem.capacity_bytes),
        host=host,
        node_bytes=node,
        time=time,
        step_seconds=sum(time.values(), np.zeros(len(index))),
    )


def _chunk_states(chunked: Chunked) -> ChunkStates:
    states, sharding = chunked.shared.states, chunked.sharding
    cores, core = chunked.cores
    return ChunkStates(
        gathered_bytes=chunked.states("gathered_bytes"),
        whole_numel=chunked.states("whole_numel"),
        shard_numel=chunked.states("shard_numel"),
        adamw_numel=chunked.states("adamw_numel"),
        muon_numel=chunked.states("muon_numel"),
        largest_row_numel=chunked.max(states.whole_numel[:, sharding]),
        gathering=_gathering(chunked),
        largest_matrix=chunked.max(states.largest_matrix[:, sharding]),
        largest_adamw=chunked.max(states.largest_adamw[:, sharding]),
        largest_muon=chunked.max(states.largest_muon[:, sharding]),
        counters=(cores.counts @ chunked.shared.work.buffer_bytes)[core],
    )


def _gathering(chunked: Chunked) -> Floats:
    """Bytes that a chunk's gathers arrive in: the root's, or the running and the next layer's."""
    states, sharding = chunked.shared.states, chunked.sharding
    each = states.gathered_bytes[:, sharding].copy()
    root = each[[FIRST, LAST]].sum(axis=0) if chunked.pp == 1 else each[[FIRST, LAST]]
    each *= 2
    each[[FIRST, LAST]] = root
    return chunked.max(each)


def _without_pipeline(chunked: Chunked) -> LayerMoments:
    own, layers = chunked.own, chunked.shared.work.telling_layers
    held = layer_activations(chunked), layer_states(chunked)
    return layer_moments(*held, layers, own.zero, own.micro_batches, chunked.shared.sizes)


def _chunk_activations(chunked: Chunked) -> ChunkActivations:
    cores, core = chunked.cores
    parts, cell = cores.shared.parts, cores.cell
    kept = temporary = np.zeros((len(cores.own), 1))
    if cores.pp > 1:
        kept, temporary = _at_worst_moment(cores)
    received, returned = handed_over(cores)
    staged = STAGED_STATES * parts.moved[:, cell].max(axis=0)
    each = (kept, temporary, received, returned, parts.hidden[cell], staged)
    return ChunkActivations(*(of_core[core] for of_core in each))


def _at_worst_moment(chunked: Chunked) -> tuple[Floats, Floats]:
    """Kept activations and what is added to them, when each rank of a pipeline has most of both."""
    own, pp, parts = chunked.own, chunked.pp, chunked.shared.parts
    saved, whole = by_rank(chunked.cells("saved"), pp), by_rank(backward_of_chunks(chunked), pp)
    if not chunked.is_v_shaped:
        return at_worst_moment(saved, whole, own.micro_batches)
    each = parts.beyond_whole[own.recompute, :, chunked.cell]
    sizes = saved, by_rank(chunked.cells("waiting"), pp), whole, by_rank(chunked.max(each.T), pp)
    return v_at_worst_moment(chunked.schedule, *sizes, chunked.is_split, own.micro_batches)


def backward_of_chunks(chunked: Chunked) -> Floats:
    """What each chunk's backward adds at most to what the chunk keeps, less what it has freed by then.

    Layer by layer from the chunk's last on, [layouts, chunks]; behind the last one stands the head, whose
    gradient stays.
    """
    own, cell, work = chunked.own, chunked.cell, chunked.shared.work
    parts, policies = chunked.shared.parts, own.recompute * len(chunked.shared.cells) + cell
    beyond = parts.beyond_whole[own.recompute, :, cell]
    kept = chunked.shared.under_each_policy("saved")[policies]
    head = parts.saved[own.recompute, LAST, cell]
    last = chunked.bounds[:, -2:-1] <= np.arange(work.layers)
    alive = beyond[:, work.layer_rows] + kept[:, 1:] + last * parts.peaks.head_gradient[cell][:, None]
    alive[:, -1] = np.maximum(alive[:, -1] - head, beyond[:, LAST] + kept[:, -1])
    alive[:, 0] = np.maximum(alive[:, 0], beyond[:, FIRST] + parts.saved[own.recompute, FIRST, cell])
    begins = (np.arange(len(own))[:, None] * work.layers + chunked.bounds[:, :-1]).ravel()
    most = np.maximum.reduceat(alive.ravel(), begins).reshape(len(own), -1)
    ends = np.take_along_axis(kept, chunked.bounds[:, 1:], axis=1)
    result: Floats = np.maximum(most - ends, 0.0)[:, chunked.order]
    return result


def outside_bytes(problem: Problem, own: Candidates) -> dict[str, Floats]:
    """Memory outside the allocator: context, libraries, one communicator per group larger than one rank."""
    e = problem.machine.efficiency
    groups = groups_of(own)
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


def time_breakdown(group: Group) -> dict[str, Floats]:
    """The step by what it is spent on: the busiest pipeline rank's work, its idle time, and the rest."""
    chunked, pp = group.chunked, group.pp
    parts, cell, own = chunked.shared.parts, chunked.cell, chunked.own
    busy = by_rank(chunked.cells("forward") + chunked.cells("backward"), pp).sum(axis=1)
    busiest = busy.argmax(axis=1)
    ranks = chunked.counts.reshape(len(own), -1, pp, chunked.counts.shape[2]).sum(axis=1)
    rows = ranks[np.arange(len(own)), busiest]

    def on_busiest(per_row: Floats) -> Floats:
        result: Floats = np.einsum("nr,rn->n", rows, per_row[:, cell]) * own.micro_batches
        return result

    compute, transfer = parts.compute.sum(axis=0), parts.transfer.sum(axis=0)
    items = {name: on_busiest(compute[i]) for i, name in enumerate(CATEGORIES)}
    items |= {AXIS_TIME[axis]: on_busiest(transfer[i]) for i, axis in enumerate(AXES)}
    if parts.moved.any():
        items["activations to and from the host"] = on_busiest(parts.copying)
    items["waiting for the host to issue work"] = on_busiest(parts.host)
    total = own.micro_batches * busy.max(axis=1)
    items["recomputation"] = total - sum(items.values(), np.zeros(len(own)))
    items["pipeline bubble and transfers"] = group.time[PASSES] - total
    return items | {name: group.time[name] for name in TIMES if name in group.time}
