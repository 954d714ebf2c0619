"""Seconds of one optimizer step on the critical path, vectorised over layouts that are cut alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler.chunked import Chunked, groups_of, handed_over
from shipway.compiler.evaluate_states import Bytes
from shipway.compiler.layouts import Candidates
from shipway.compiler.memory import ChunkStates, by_rank
from shipway.compiler.optimizer_copies import copy_seconds
from shipway.compiler.problem import Problem
from shipway.compiler.schedule import pipeline_seconds
from shipway.compiler.v_timing import v_seconds
from shipway.compiler.workload import FIRST

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PASSES = "passes"

EXPOSED = "parameter gather and gradient reduction, exposed"

OPTIMIZER_TIME = "optimizer"

CHECKPOINTS = "checkpoints, spread over steps"

COPIES = "optimizer state from and to the host"

SHARDING = "copies of parameters and gradients for FSDP"

TIMES = (EXPOSED, SHARDING, OPTIMIZER_TIME, COPIES, CHECKPOINTS)
"""Parts of a step beside its passes."""

MOMENTUM_BYTES = 4
"""Momentum and updates travel in fp32."""
MULTI_TENSOR = 1.5
"""Over lists of tensors torch's kernels take so much longer than a copy of as many bytes (H200,
bench/results/h200-verify-seed4.json)."""
NEWTON_SCHULZ_MOVES = 22
"""Bytes for an element of a matrix beside the products, half of what an eager update moves: scaling, rounding
and widening again."""


def step_time(problem: Problem, chunked: Chunked, states: ChunkStates) -> dict[str, Floats]:
    """Seconds on the critical path of one optimizer step; `passes` are forward and backward."""
    cores, core = chunked.cores
    forward, backward = cores.cells("forward"), cores.cells("backward")
    parts = {
        PASSES: pass_seconds(problem, cores, forward, backward)[core],
        EXPOSED: exposed_sharding(problem, chunked, backward[core]),
        SHARDING: sharding_copies(problem, chunked, states),
        OPTIMIZER_TIME: optimizer_seconds(problem, chunked, states),
        CHECKPOINTS: checkpoint_seconds(problem, chunked, states),
    }
    if chunked.shared.sizes.hosted:
        parts[COPIES] = copy_seconds(problem, chunked, states, *update_seconds(problem, chunked, states))
    return parts


def pass_seconds(problem: Problem, chunked: Chunked, forward: Floats, backward: Floats) -> Floats:
    """Length of all forward and backward passes of a step."""
    send, count = send_seconds(problem, chunked), chunked.own.micro_batches
    if chunked.is_v_shaped:
        order, deferred = chunked.order, deferred_seconds(chunked, backward)
        ordered = forward[:, order], backward[:, order], deferred[:, order]
        return v_seconds(chunked.schedule, *ordered, send, count)
    pp = chunked.pp
    return pipeline_seconds(by_rank(forward, pp), by_rank(backward, pp), send, count, chunked.own.pp)


def deferred_seconds(chunked: Chunked, backward: Floats) -> Floats:
    """The part of each chunk's backward that a V-shaped schedule's `W` does, [layouts, chunks].

    The first chunk has no input to differentiate: all of its backward waits.
    """
    deferred = chunked.cells("weight")
    deferred[:, 0] = backward[:, 0]
    result: Floats = np.where(chunked.is_split[:, None], deferred, 0.0)
    return result


def send_seconds(problem: Problem, chunked: Chunked) -> Floats:
    """Time to pass the largest hand-over of one micro-batch to the next pipeline rank."""
    if chunked.pp == 1:
        return np.zeros(len(chunked.own))
    received, _ = handed_over(chunked)
    return hand_over_seconds(problem, chunked.own, received.max(axis=1))


def hand_over_seconds(problem: Problem, own: Candidates, sent_bytes: Floats) -> Floats:
    """Time to pass so many bytes to the next pipeline rank."""
    size, stride = groups_of(own)["pp"]
    seconds: Floats = problem.network.collective_seconds("send_receive", sent_bytes, size, stride)
    return seconds


def exposed_sharding(problem: Problem, chunked: Chunked, backward: Floats) -> Floats:
    """What FSDP's gathers and reductions add to the step.

    Without a pipeline each micro-batch gathers a row while the one before runs, forward and (ZeRO 3)
    backward, and reduces a row while the next one's backward runs; under ZeRO 1 the first micro-batch
    alone gathers and the last alone reduces. Under a pipeline parameters are gathered once, under the
    first forward, and gradients reduced once, after a chunk's last backward.
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
        times = np.where(own.zero == 1, 1, own.micro_batches)
        alone: Floats = times * (late[:, 0] + later + edges) + once + replicate[FIRST]
        return alone
    virtual = late.shape[1] // pp
    first = by_rank(late, pp).sum(axis=1).max(axis=1)
    again = late.max(axis=1) * _regathers(problem, own, pp, virtual)
    total = by_rank(chunked.sum(reduce + replicate), pp)
    if chunked.is_v_shaped:  # all ranks end together
        together: Floats = first + again + total.sum(axis=1).max(axis=1)
        return together
    # A rank's reduction runs while the ranks before it still go backward.
    own_backward = by_rank(backward, pp)[:, 0, :]
    slack = np.cumsum(own_backward, axis=1) - own_backward
    tail = np.maximum(total[:, 0, :] - slack, 0.0).max(axis=1)
    piped: Floats = first + again + tail
    return piped


def sharding_copies(problem: Problem, chunked: Chunked, states: ChunkStates) -> Floats:
    """What FSDP2 itself reads and writes around its collectives, on the busiest rank.

    A gather casts the shard, copies it in and the whole out; a reduction lays the gradients one after the
    other in the dtype that they are summed in, and adds the shard to what is there. One rank alone copies
    where others would receive.
    """
    times, each = copied_bytes(chunked.own, chunked.shared.sizes)
    whole = by_rank(states.whole_numel, chunked.pp).sum(axis=1).max(axis=1)
    seconds: Floats = problem.machine.memory_seconds(whole * times * each)
    return seconds


def copied_bytes(own: Candidates, sizes: Bytes) -> tuple[Ints, Floats]:
    """How often in a step parameters are copied, and the bytes of each parameter of a rank each time."""
    ranks, piped = own.shard * own.cp, own.pp > 1
    cast = sizes.master + sizes.compute if sizes.master != sizes.compute else 0
    gathered = 2 * sizes.compute + (cast + 2 * sizes.compute) / ranks
    alone = np.where(ranks == 1, 2 * sizes.gradient, 0)
    added = np.where(own.micro_batches > 1, 3 * sizes.master, 0) / ranks
    reduced = sizes.compute + sizes.gradient + alone + added
    times = np.where((own.zero == 1) | piped, 1, own.micro_batches)
    gathers = np.where((own.zero == 3) & ~piped, 2, 1)
    return times, gathers * gathered + reduced


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


def update_seconds(problem: Problem, chunked: Chunked, states: ChunkStates) -> tuple[Floats, Floats]:
    """Elementwise work and orthogonalisation of each rank, [layouts, ranks].

    AdamW reads parameter, gradient and two moments and writes three; Muon reads three and writes two. A
    moving average reads itself and the weights, and writes itself.
    """
    sizes, pp = chunked.shared.sizes, chunked.pp
    adamw, muon = by_rank(states.adamw_numel, pp).sum(axis=1), by_rank(states.muon_numel, pp).sum(axis=1)
    work = by_rank(chunked.states("muon_flops"), pp).sum(axis=1)
    return seconds_to_update(problem, sizes, adamw, muon, work)


def seconds_to_update(
    problem: Problem, sizes: Bytes, adamw: Floats, muon: Floats, work: Floats
) -> tuple[Floats, Floats]:
    """The same of so many elements, and FLOPs of orthogonalisation."""
    m, eager = problem.machine, problem.machine.efficiency.eager_elementwise
    moved = adamw * (3 * sizes.master + 4 * sizes.moment) * (MULTI_TENSOR if sizes.updates_in_one else eager)
    moved = moved + muon * (3 * sizes.master + 2 * sizes.moment + NEWTON_SCHULZ_MOVES) * eager
    if sizes.average:
        moved = moved + (adamw + muon) * (sizes.master + 2 * sizes.average) * eager
    # Gradients are read for the norm, read and written for clipping.
    norm = (adamw + muon) * 3 * sizes.master * MULTI_TENSOR
    seconds = m.memory_seconds(moved + norm)
    return seconds, work / (m.peak_flops * m.efficiency.orthogonalisation)


def optimizer_seconds(problem: Problem, chunked: Chunked, states: ChunkStates) -> Floats:
    """Clip, update and orthogonalise on the busiest rank.

    Muon moves the shards of matrices that ranks cut to their owners and back, in fp32. Routers' counters are
    summed at the end.
    """
    elementwise, products = update_seconds(problem, chunked, states)
    seconds, pp = elementwise + products, chunked.pp
    moved = by_rank(chunked.states("exchanged_numel"), pp).sum(axis=1).max(axis=1) * MOMENTUM_BYTES
    exchange = problem.network.collective_seconds("all_to_all", moved, *groups_of(chunked.own)["dp_shard"])
    result: Floats = seconds.max(axis=1) + 2 * exchange + counter_seconds(problem, chunked)
    return result


def counter_seconds(problem: Problem, chunked: Chunked) -> Floats:
    """Sums of routers' counters over all ranks with other tokens, router by router, axis by axis."""
    groups, row_bytes = groups_of(chunked.own), chunked.shared.work.buffer_bytes
    each = np.zeros((len(row_bytes), len(chunked.own)))
    for size in set(row_bytes[row_bytes > 0].tolist()):
        each[row_bytes == size] = sum(
            problem.network.collective_seconds("all_reduce", size, *groups[axis])
            for axis in ("dp_replicate", "dp_shard", "tp")
        )
    per_rank = by_rank(chunked.sum(each), chunked.pp).sum(axis=1)
    longest: Floats = per_rank.max(axis=1)
    return longest


def checkpoint_seconds(problem: Problem, chunked: Chunked, states: ChunkStates) -> Floats:
    """Stall of one save over the steps between saves: the copy to the host, or the whole write."""
    checkpoints, cluster = problem.blueprint.training.checkpoints, problem.blueprint.cluster
    sizes, pp, own = chunked.shared.sizes, chunked.pp, chunked.own
    moments = 2 * states.adamw_numel + states.muon_numel
    mine = by_rank(states.shard_numel * sizes.weight + moments * sizes.moment, pp).sum(axis=1)
    stall = mine.max(axis=1) / cluster.device.host_bandwidth
    if not checkpoints.asynchronous:
        written = mine.mean(axis=1) * own.world / own.replicate
        stall = stall + written / cluster.storage.write_bandwidth
    result: Floats = stall / checkpoints.every_steps
    return result
