"""Memory and step time of many layouts at once.

Layouts that have the same number of pipeline ranks and chunks are evaluated together; what they share
(cells of a micro-batch, shardings of the states, cuts of the model) is worked out once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shipway.compiler.cut import RESOLUTION, cut
from shipway.compiler.evaluate_parts import (
    AXES,
    POLICIES,
    Cells,
    PartCosts,
    load_imbalance,
    part_costs,
)
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
from shipway.compiler.workload import FIRST, LAST, Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

AXIS_TIME = {
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel collectives",
    "ep": "expert all-to-all",
}


CELL_SUMS = ("forward", "backward", "saved")
"""Running sums that do not depend on the sharding."""


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
    work: Workload
    sums: dict[tuple[str, int], Floats] = field(default_factory=dict)
    """Running sums over layers that have been asked for, see `running`."""
    cuts: dict[tuple[bytes, int], tuple[int, ...]] = field(default_factory=dict)
    """Boundaries by rounded costs and chunks."""
    guesses: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The latest cut for a number of chunks, near to the next one."""

    @cached_property
    def rounded(self) -> Ints:
        """Seconds of each row in steps of the heaviest layer's, [rows, policies, cells], for cutting."""
        both = (self.parts.forward[None] + self.parts.backward).transpose(1, 0, 2)
        heaviest = both[np.unique(self.work.layer_rows)].max(axis=0)
        steps: Ints = np.rint(both / heaviest * RESOLUTION).astype(np.int64)
        return steps

    def take(self, index: Ints) -> Tables:
        """The same tables for a selection of layouts."""
        result = replace(self, cell_of=self.cell_of[index], sharding_of=self.sharding_of[index])
        result.__dict__["rounded"] = self.rounded
        return result

    def alone(self, layout: int) -> Tables:
        """Tables of one layout, with nothing else in them."""
        cell, sharding = int(self.cell_of[layout]), int(self.sharding_of[layout])
        zero = np.zeros(1, dtype=np.int64)
        result = Tables(
            self.cells.at(cell),
            zero,
            self.parts.at(cell),
            self.shardings.at(sharding),
            zero,
            self.states.at(sharding),
            self.sizes,
            self.work,
        )
        result.__dict__["rounded"] = self.rounded[:, :, cell : cell + 1]
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

    def _per_row(self, name: str, policy: int) -> Floats:
        match name:
            case "forward":
                result: Floats = self.parts.forward
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
    return Tables(
        cells=cells,
        cell_of=cell_of,
        parts=part_costs(problem.work, cells, problem.machine, problem.network, problem.fused),
        shardings=shardings,
        sharding_of=sharding_of,
        states=state_costs(problem.parameters, shardings, problem.network, training),
        sizes=element_bytes(training),
        work=problem.work,
    )


def shardings_of(candidates: Candidates) -> tuple[Shardings, Ints]:
    """Distinct shardings, and which one each layout has."""
    c = candidates
    region = c.shard * c.cp * c.tp
    rows, which = unique_rows(c.tp, c.ep, c.shard * c.cp, region // c.ep)
    return Shardings(*rows.T), which


def unique_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Distinct rows of equally long columns of small numbers, in sorted order, and which one each row is."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        # Mixed-radix codes sort like the rows and far faster.
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return np.column_stack(columns)[first], which.reshape(-1)


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
    return Cells(context, sequences, cp, tp, ep, load_imbalance(experts, local_tokens, ep, percentile))


@dataclass(frozen=True, eq=False)
class Group:
    """Layouts of one pp and one number of chunks, evaluated; arrays over layouts first."""

    pp: int
    chunks: int
    index: Ints
    """Positions among the candidates."""
    chunked: Chunked
    memory: MemoryTerms
    peaks: Peaks
    time: dict[str, Floats]
    """Parts that add up to the step; each [layouts]."""
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


def cut_bounds(shared: Tables, own: Candidates, chunks: int) -> Ints:
    """The balanced cut of each layout, [layouts, chunks + 1]."""
    keys, which = np.unique(shared.cell_of * POLICIES + own.recompute, return_inverse=True)
    if chunks == 1:
        return np.tile(np.array([0, shared.work.layers]), (len(own), 1))
    bounds = np.array([_cut(shared, int(key), chunks) for key in keys], dtype=np.int64)
    spread: Ints = bounds[which.reshape(-1)]
    return spread


def _cut(shared: Tables, key: int, chunks: int) -> tuple[int, ...]:
    """Cut for one cell and policy; cells whose rows cost alike share it."""
    cell, policy = divmod(key, POLICIES)
    costs = shared.rounded[:, policy, cell]
    memo = (costs.tobytes(), chunks)
    held = shared.cuts.get(memo)
    if held is None:
        layers = costs[shared.work.layer_rows]
        layers[0] += costs[FIRST]
        layers[-1] += costs[LAST]
        held = shared.cuts[memo] = cut(layers.tolist(), chunks, shared.guesses.get(chunks))
        shared.guesses[chunks] = held
    return held


@dataclass(frozen=True, eq=False)
class Chunked:
    """Layouts of one number of chunks, cut; sums over the layers of each chunk."""

    shared: Tables
    own: Candidates
    pp: int
    bounds: Ints

    @property
    def cell(self) -> Ints:
        """Cell of each layout."""
        return self.shared.cell_of

    @property
    def sharding(self) -> Ints:
        """Sharding of each layout."""
        return self.shared.sharding_of

    def between(self, running: Floats, which: Ints) -> Floats:
        """Sums of a quantity over each chunk: [layouts, chunks]."""
        at = running[which[:, None], self.bounds]
        result: Floats = at[:, 1:] - at[:, :-1]
        return result

    def cells(self, name: str) -> Floats:
        """Chunk sums of a quantity per cell, under each layout's recomputation policy."""
        if name == "forward":
            return self.between(self.shared.running(name), self.cell)
        result = np.empty((len(self.own), self.bounds.shape[1] - 1))
        for policy in range(POLICIES):
            mine = np.flatnonzero(self.own.recompute == policy)
            if len(mine):
                running = self.shared.running(name, policy)
                at = running[self.cell[mine][:, None], self.bounds[mine]]
                result[mine] = at[:, 1:] - at[:, :-1]
        return result

    def states(self, name: str) -> Floats:
        """Chunk sums of a quantity per sharding."""
        return self.between(self.shared.running(name), self.sharding)

    @cached_property
    def counts(self) -> Floats:
        """How often each row occurs in each chunk: [layouts, chunks, rows]."""
        return row_counts(self.shared.work, self.bounds)

    def sum(self, per_row: Floats) -> Floats:
        """[rows, layouts] summed over the rows of each chunk: [layouts, chunks]."""
        result: Floats = np.matmul(self.counts, per_row.T[:, :, None])[..., 0]
        return result

    def max(self, per_row: Floats) -> Floats:
        """[rows, layouts], largest over the rows that a chunk has."""
        present = self.counts > 0
        result: Floats = np.where(present, per_row.T[:, None, :], 0.0).max(axis=2)
        return result


def _evaluate_group(
    problem: Problem, candidates: Candidates, shared: Tables, pp: int, chunks: int, index: Ints
) -> Group:
    chunked = chunk(candidates.take(index), shared.take(index), pp, chunks)
    own = chunked.own
    states = _chunk_states(chunked)
    terms = memory_terms(
        states,
        _chunk_activations(chunked),
        outside_bytes(problem, own),
        pp,
        own.zero,
        own.micro_batches,
        shared.sizes,
        problem.space.capability,
    )
    time = step_time(problem, chunked, states)
    return Group(
        pp=pp,
        chunks=chunks,
        index=index,
        chunked=chunked,
        memory=terms,
        peaks=peaks(terms, problem.machine.efficiency),
        time=time,
        step_seconds=sum(time.values(), np.zeros(len(index))),
    )


def chunk(own: Candidates, shared: Tables, pp: int, chunks: int) -> Chunked:
    """Cut layouts that all have `pp` ranks and `chunks` chunks."""
    return Chunked(shared, own, pp, cut_bounds(shared, own, chunks))


def row_counts(work: Workload, bounds: Ints) -> Floats:
    """How often each row occurs in each chunk: [layouts, chunks, rows]."""
    ahead = np.zeros((work.layers + 1, len(work.rows)))
    ahead[np.arange(1, work.layers + 1), work.layer_rows] = 1
    ahead = ahead.cumsum(axis=0)
    counts = ahead[bounds[:, 1:]] - ahead[bounds[:, :-1]]
    counts[:, 0, FIRST] = 1
    counts[:, -1, LAST] = 1
    return counts


def _chunk_states(chunked: Chunked) -> ChunkStates:
    states, sharding = chunked.shared.states, chunked.sharding
    return ChunkStates(
        gathered_bytes=chunked.states("gathered_bytes"),
        whole_numel=chunked.states("whole_numel"),
        shard_numel=chunked.states("shard_numel"),
        adamw_numel=chunked.states("adamw_numel"),
        muon_numel=chunked.states("muon_numel"),
        largest_row_gathered=chunked.max(states.gathered_bytes[:, sharding]),
        largest_row_numel=chunked.max(states.whole_numel[:, sharding]),
        largest_matrix=chunked.max(states.largest_matrix[:, sharding]),
    )


def _chunk_activations(chunked: Chunked) -> ChunkActivations:
    parts, cell = chunked.shared.parts, chunked.cell
    temporary = parts.scratch[:, cell] + parts.overhead[chunked.own.recompute, :, cell].T
    hidden = parts.hidden[cell]
    received, returned = handed_over(chunked)
    return ChunkActivations(chunked.cells("saved"), chunked.max(temporary), received, returned, hidden)


def handed_over(chunked: Chunked) -> tuple[Floats, Floats]:
    """Bytes of hidden states that each chunk receives, and of gradients that come back to it."""
    states = (
        chunked.shared.work.states_before[chunked.bounds] * chunked.shared.parts.hidden[chunked.cell][:, None]
    )
    received, returned = states[:, :-1].copy(), states[:, 1:].copy()
    received[:, 0] = 0.0
    returned[:, -1] = 0.0
    return received, returned


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


PASSES = "passes"
EXPOSED = "parameter gather and gradient reduction, exposed"
OPTIMIZER_TIME = "optimizer"
CHECKPOINTS = "checkpoints, spread over steps"


def step_time(problem: Problem, chunked: Chunked, states: ChunkStates) -> dict[str, Floats]:
    """Seconds on the critical path of one optimizer step; `passes` are forward and backward."""
    forward, backward = chunked.cells("forward"), chunked.cells("backward")
    return {
        PASSES: pass_seconds(problem, chunked, forward, backward),
        EXPOSED: exposed_sharding(problem, chunked, backward),
        OPTIMIZER_TIME: optimizer_seconds(problem, chunked, states),
        CHECKPOINTS: checkpoint_seconds(problem, chunked, states),
    }


def pass_seconds(problem: Problem, chunked: Chunked, forward: Floats, backward: Floats) -> Floats:
    """Length of all forward and backward passes of a step."""
    send = send_seconds(problem, chunked)
    return pipeline_seconds(forward, backward, send, chunked.own.micro_batches, chunked.pp)


def send_seconds(problem: Problem, chunked: Chunked) -> Floats:
    """Time to pass the largest hand-over of one micro-batch to the next pipeline rank."""
    own = chunked.own
    if chunked.pp == 1:
        return np.zeros(len(own))
    size, stride = groups_of(own)["pp"]
    received, _ = handed_over(chunked)
    seconds: Floats = problem.network.collective_seconds("send_receive", received.max(axis=1), size, stride)
    return seconds


def groups_of(own: Candidates) -> dict[str, tuple[Ints, Ints]]:
    """(size, stride) of every process group of each layout."""
    return axis_groups(own.pp, own.replicate, own.shard, own.cp, own.tp, own.ep)


def exposed_sharding(problem: Problem, chunked: Chunked, backward: Floats) -> Floats:
    """What FSDP's gathers and reductions add to the step.

    Without a pipeline each micro-batch gathers a row while the one before runs, forward and (ZeRO 3)
    backward, and reduces a row while the next one's backward runs. Under a pipeline parameters are
    gathered once, under the first forward, and gradients reduced once, after a chunk's last backward.
    """
    own, pp, cell, sharding = chunked.own, chunked.pp, chunked.cell, chunked.sharding
    parts, states = chunked.shared.parts, chunked.shared.states
    gather, reduce = states.gather_seconds[:, sharding], states.reduce_seconds[:, sharding]
    replicate = replicate_seconds(problem, chunked)
    late = chunked.sum(np.maximum(gather - parts.forward[:, cell], 0))
    if pp == 1:
        behind = parts.backward[own.recompute, :, cell].T
        regather = np.where(own.zero == 3, gather, 0.0)
        later = chunked.sum(np.maximum(regather + reduce - behind, 0))[:, 0]
        edges = gather[FIRST] + reduce[FIRST]
        once = chunked.sum(np.maximum(replicate + regather + reduce - behind, 0))[:, 0] - later
        alone: Floats = own.micro_batches * (late[:, 0] + later + edges) + once + replicate[FIRST]
        return alone
    virtual = late.shape[1] // pp
    first = by_rank(late, pp).sum(axis=1).max(axis=1)
    again = late.max(axis=1) * _regathers(problem, own, pp, virtual)
    # A rank's reduction runs while the ranks before it still go backward.
    total = by_rank(chunked.sum(reduce + replicate), pp)
    own_backward = by_rank(backward, pp)[:, 0, :]
    slack = np.cumsum(own_backward, axis=1) - own_backward
    tail = np.maximum(total[:, 0, :] - slack, 0.0).max(axis=1)
    piped: Floats = first + again + tail
    return piped


def _regathers(problem: Problem, own: Candidates, pp: int, virtual: int) -> Floats:
    """Gathers beyond the first of each chunk: torch keeps only a few chunks of a rank gathered."""
    if virtual <= problem.space.capability.active_stages_gathered:
        return np.zeros(len(own))
    return 2.0 * virtual * np.maximum(own.micro_batches / pp - 1, 0)


def replicate_seconds(problem: Problem, chunked: Chunked) -> Floats:
    """All-reduce of each row's gradient shard over the replicas: [rows, layouts]."""
    size, stride = groups_of(chunked.own)["dp_replicate"]
    states, sizes = chunked.shared.states, chunked.shared.sizes
    if (size == 1).all():
        return np.zeros((len(states.shard_numel), len(chunked.own)))
    shard = states.shard_numel[:, chunked.sharding] * sizes.gradient
    seconds: Floats = problem.network.collective_seconds("all_reduce", shard, size, stride)
    return seconds


def optimizer_seconds(problem: Problem, chunked: Chunked, states: ChunkStates) -> Floats:
    """Clip, update and orthogonalise on the busiest rank.

    AdamW reads parameter, gradient and two moments and writes three; Muon reads three and writes two,
    and moves each shard of the momentum to its matrix's owner and back in bf16.
    """
    sizes, m, pp = chunked.shared.sizes, problem.machine, chunked.pp
    adamw, muon = by_rank(states.adamw_numel, pp).sum(axis=1), by_rank(states.muon_numel, pp).sum(axis=1)
    work = by_rank(chunked.states("muon_flops"), pp).sum(axis=1)
    moved = adamw * (3 * sizes.master + 4 * sizes.moment) + muon * (3 * sizes.master + 2 * sizes.moment)
    norm = (adamw + muon) * 2 * sizes.master
    seconds = m.memory_seconds(moved * m.efficiency.eager_elementwise + norm)
    seconds = seconds + work / (m.peak_flops * m.efficiency.orthogonalisation)
    size, stride = groups_of(chunked.own)["dp_shard"]
    exchange = problem.network.collective_seconds("all_to_all", muon.max(axis=1) * 2, size, stride)
    result: Floats = seconds.max(axis=1) + 2 * exchange
    return result


def checkpoint_seconds(problem: Problem, chunked: Chunked, states: ChunkStates) -> Floats:
    """Stall of one save over the steps between saves: the copy to the host, or the whole write."""
    checkpoints, cluster = problem.blueprint.training.checkpoints, problem.blueprint.cluster
    sizes, pp, own = chunked.shared.sizes, chunked.pp, chunked.own
    moments = 2 * states.adamw_numel + states.muon_numel
    mine = by_rank(states.shard_numel * sizes.master + moments * sizes.moment, pp).sum(axis=1)
    stall = mine.max(axis=1) / cluster.device.host_bandwidth
    if not checkpoints.asynchronous:
        written = mine.mean(axis=1) * own.world / own.replicate
        stall = stall + written / cluster.storage.write_bandwidth
    result: Floats = stall / checkpoints.every_steps
    return result


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
    items["waiting for the host to issue work"] = on_busiest(parts.host)
    total = own.micro_batches * busy.max(axis=1)
    items["recomputation"] = total - sum(items.values(), np.zeros(len(own)))
    items["pipeline bubble and transfers"] = group.time[PASSES] - total
    return items | {name: group.time[name] for name in (EXPOSED, OPTIMIZER_TIME, CHECKPOINTS)}
