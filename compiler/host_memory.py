"""Memory of a node's host, where a layout keeps things there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler.chunked import Chunked
from shipway.compiler.memory import ChunkStates, by_rank, kept_activations
from shipway.compiler.problem import Problem
from shipway.compiler.v_memory import v_kept

Floats = npt.NDArray[np.float64]

PROCESS_BYTES = {"cpu": 2**30}
"""Assumed of one rank's process by kind of device: interpreter, libraries, data workers."""
CUDA_PROCESS_BYTES = 4 * 2**30
USABLE_SHARE = 0.9
"""Assumed share of a node's memory that ranks can have: the rest is the system's, and its cache of files."""

STATE, ACTIVATIONS = "optimizer state, offloaded", "kept activations, offloaded"
SAVING, PROCESSES = "copy of the state that a checkpoint writes", "processes"


def host_bytes(problem: Problem, chunked: Chunked, states: ChunkStates) -> dict[str, Floats]:
    """Host memory of one rank by item, [layouts, ranks], at its fullest: while a checkpoint is written."""
    sizes, pp = chunked.shared.sizes, chunked.pp
    shard = by_rank(states.shard_numel, pp).sum(axis=1)
    moments = by_rank(2 * states.adamw_numel + states.muon_numel, pp).sum(axis=1) * sizes.moment
    process = PROCESS_BYTES.get(problem.blueprint.cluster.device.kind, CUDA_PROCESS_BYTES)
    return {
        STATE: moments * sizes.hosted,
        ACTIVATIONS: _host_activations(problem, chunked),
        SAVING: shard * sizes.weight + moments,
        PROCESSES: np.full_like(shard, float(process)),
    }


def _host_activations(problem: Problem, chunked: Chunked) -> Floats:
    """Hidden states of all micro-batches in flight, each in a block of a power of two bytes.

    torch's allocator of pinned memory rounds up to that, and keeps blocks for the next step.
    """
    own, hidden = chunked.own, chunked.shared.parts.hidden[chunked.cell]
    moved = chunked.cells("moved")
    rounded = by_rank(moved * (np.exp2(np.ceil(np.log2(hidden))) / hidden)[:, None], chunked.pp)
    if not chunked.is_v_shaped:
        return kept_activations(rounded, own.micro_batches)
    return v_kept(chunked.schedule, rounded, np.zeros_like(rounded), chunked.is_split, own.micro_batches)


def node_bytes(problem: Problem, chunked: Chunked, per_rank: Floats) -> Floats:
    """Memory of the fullest node, [layouts]: ranks of one pipeline rank stand side by side, then the next."""
    ranks_per_node = problem.blueprint.cluster.devices_per_node
    beside = chunked.own.world // chunked.pp
    result: Floats = per_rank.max(axis=1) * np.minimum(ranks_per_node, chunked.own.world)
    for count in np.unique(beside):
        together = ranks_per_node // count if ranks_per_node % count == 0 else 1
        if 1 < together <= chunked.pp and chunked.pp % together == 0:
            rows = beside == count
            nodes = per_rank[rows].reshape(int(rows.sum()), -1, together).sum(axis=2)
            result[rows] = nodes.max(axis=1) * count
    return result


def host_capacity(problem: Problem) -> int:
    """Memory of one node that ranks can have."""
    return int(problem.blueprint.cluster.host_memory * USABLE_SHARE)
