"""Memory of every pipeline rank at the moments of a step that can be its peak.

Vectorised over layouts of one number of chunks: every item has shape [layouts, pipeline ranks]. The
search adds items up; a plan lists them. One code path, so that what is listed is what was searched by.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler.evaluate_states import Bytes
from shipway.compiler.frozen import frozen
from shipway.compiler.layer_timeline import SHARDED_GRADIENTS, WHOLE_GRADIENTS, LayerMoments
from shipway.compiler.schedule import backward_moments, in_flight, steady
from shipway.compiler.unique import distinct
from shipway.schemas.calibration import Efficiency
from shipway.schemas.capability import Capability

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BACKWARD = "the backward begins that has most beside it in this rank's schedule"
HEAD = "the head makes the loss, with all activations kept"
IN_LAYER = "backward passes layer"
REDUCTION = "gradients are reduced after the last backward"
ROOT = "gradients of embedding and head are reduced"
OPTIMIZER = "optimizer step"

STAGED_STATE = "slices of offloaded optimizer state"
STAGED_ACTIVATIONS = "offloaded activations under way"
OTHER_MOMENTS = "kept by the allocator for other moments"
CUBLAS = "cuBLAS workspaces"

ALLOCATOR_SLACK_BYTES = 64 * 2**20
"""The last, partly used segments of the caching allocator's pools (2 and 20 MiB)."""
CUBLAS_WORKSPACE_BYTES = 2 * 32 * 2**20
"""In the allocator, of the threads that run forward and backward (ATen/cuda/CublasHandlePool.cpp, Hopper)."""
NEWTON_SCHULZ_BYTES = 14
"""Per element of a slice: what comes out, fp32, and four bf16 copies with X X^T and its powers beside."""
SLICE_ELEMENTS = 2**25
"""Of a stack, what Newton-Schulz takes at a time (runtime/newton_schulz.py)."""
ROUND_BYTES = 512 * 2**20
"""Directions that are made before a round of updates (runtime/muon.py); the last one may go beyond."""
ADAMW_COPIES = 3
"""fp32 tensors of a parameter's size that its update makes where torch's kernel does not take the dtypes."""


@frozen
class ChunkStates:
    """Per layout and chunk, elements or bytes on one rank; shape [layouts, chunks]."""

    gathered_bytes: Floats
    whole_numel: Floats
    shard_numel: Floats
    adamw_numel: Floats
    muon_numel: Floats
    largest_row_numel: Floats
    gathering: Floats
    """Bytes that gathers arrive in: of embedding and head, or of two layers."""
    largest_matrix: Floats
    largest_adamw: Floats
    largest_muon: Floats
    counters: Floats
    """Bytes of routers' counters between two balancing updates."""


@frozen
class ChunkActivations:
    """Per layout and chunk, bytes of one micro-batch on one rank."""

    kept: Floats
    """[layouts, ranks]: of all micro-batches, at the worst moment of each rank's schedule..."""
    temporary: Floats
    """[layouts, ranks]: what the backward that begins then adds to it; 0 without a pipeline."""
    received: Floats
    """Hidden states that the chunk receives (0 for the first)."""
    returned: Floats
    """Gradients of hidden states that it receives (0 for the last)."""
    hidden: Floats
    """[layouts]: one hidden state."""
    staged: Floats
    """[layouts]: what has not left for host memory yet, or has come back early."""


@frozen
class MemoryTerms:
    """Items by moment; each array has shape [layouts, pipeline ranks]."""

    moments: dict[str, dict[str, Floats]]
    outside: dict[str, Floats]
    """[layouts]: held outside the allocator."""
    uncertain: dict[str, Floats]
    """Part of each moment that the relative error of activations applies to."""
    reserved: Floats
    """[layouts, pipeline ranks]: what the allocator's pools hold, each the most that its stream ever needed.

    Memory that is freed serves its own stream alone: sums of gradients lie in that of FSDP's reductions, and
    what gathers arrive in in another (torch.distributed.fsdp, foreach_reduce and foreach_all_gather).
    """
    layer: Ints | None = None
    """[layouts, pipeline ranks]: the layer of moment IN_LAYER, where there is no pipeline."""

    def allocated(self) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Largest sum over the moments, and which moment it is."""
        totals = np.stack([sum(items.values(), np.float64(0)) for items in self.moments.values()])
        return totals.max(axis=0), totals.argmax(axis=0)


def by_rank(chunks: Floats, pp: int) -> Floats:
    """[layouts, chunks] to [layouts, own chunks, ranks]: chunk c sits on rank c mod pp."""
    return chunks.reshape(len(chunks), -1, pp)


def memory_terms(
    states: ChunkStates,
    activations: ChunkActivations,
    alone: LayerMoments | None,
    outside: dict[str, Floats],
    pp: int,
    micro_batches: Ints,
    sizes: Bytes,
    capability: Capability,
    fused: bool,
) -> MemoryTerms:
    """All items of all moments; `alone` are those of backward without a pipeline."""
    shard = by_rank(states.shard_numel, pp).sum(axis=1)
    adamw = by_rank(states.adamw_numel, pp).sum(axis=1)
    muon = by_rank(states.muon_numel, pp).sum(axis=1)
    kept = {
        CUBLAS: np.full_like(shard, CUBLAS_WORKSPACE_BYTES if fused else 0),
        "master weights": shard * sizes.master,
        "optimizer state": (2 * adamw + muon) * sizes.moment_here,
        "routers' counters": by_rank(states.counters, pp).sum(axis=1),
    }
    if sizes.average:
        kept["moving average of weights"] = shard * sizes.average
    handed_over = by_rank(activations.received, pp), by_rank(activations.returned, pp)
    buffers = receive_buffers(*handed_over, micro_batches, capability)
    update = {
        SHARDED_GRADIENTS: shard * sizes.master,
        "optimizer temporaries": _update_scratch(states, muon, pp, sizes, capability),
        "pipeline receive buffers": buffers,
    }
    if sizes.hosted:
        update[STAGED_STATE] = _staged(adamw, muon, sizes, capability.offload_slice_elements)
    if alone is not None:
        backward = {HEAD: alone.at_head, IN_LAYER: alone.in_layer}
        after = {ROOT: alone.after}
    else:
        backward, after = _piped(states, activations, pp, sizes, capability, buffers)
    if activations.staged.any():
        staged = np.broadcast_to(activations.staged[:, None], shard.shape)
        # Of the two, the input of the layer that backward is in counts as recomputed already.
        share = {IN_LAYER: 0.5}
        backward = {
            name: {**items, STAGED_ACTIVATIONS: staged * share.get(name, 1.0)}
            for name, items in backward.items()
        }
    moments = {name: {**kept, **items} for name, items in {**backward, **after, OPTIMIZER: update}.items()}
    uncertain = {name: np.zeros_like(shard) for name in moments}
    for name, items in backward.items():
        uncertain[name] = items["kept activations"] + items["temporaries of one layer"]
    default = np.max([_default_stream(items) for items in moments.values()], axis=0)
    if alone is not None:
        default = np.maximum(default, alone.default_stream + sum(kept.values()))
    gathers = by_rank(states.gathering, pp).max(axis=1)
    adds = (micro_batches > 1)[:, None] & (pp == 1)
    sums = shard * sizes.master + np.where(adds, row_numel(states, pp) * sizes.gradient, 0.0)
    layer = None if alone is None else alone.layer
    return MemoryTerms(moments, outside, uncertain, default + gathers + sums, layer)


def row_numel(states: ChunkStates, pp: int) -> Floats:
    """Parameters of the largest row that each rank has, [layouts, ranks]."""
    numel: Floats = by_rank(states.largest_row_numel, pp).max(axis=1)
    return numel


def _default_stream(items: dict[str, Floats]) -> Floats:
    """What of a moment's items lies in the default stream's pool."""
    total: Floats = np.sum([sizes for name, sizes in items.items() if name != SHARDED_GRADIENTS], axis=0)
    return total


def _piped(
    states: ChunkStates,
    activations: ChunkActivations,
    pp: int,
    sizes: Bytes,
    capability: Capability,
    buffers: Floats,
) -> tuple[dict[str, dict[str, Floats]], dict[str, dict[str, Floats]]]:
    """Backward under a pipeline, and what follows it."""
    whole = by_rank(states.whole_numel, pp).sum(axis=1) * sizes.gradient
    shards = by_rank(states.shard_numel, pp).sum(axis=1) * sizes.master
    gathered = stays_gathered(by_rank(states.gathered_bytes, pp), capability)
    both = {
        WHOLE_GRADIENTS: whole,
        "gathered parameters": gathered,
        "pipeline receive buffers": buffers,
    }
    backward = {
        BACKWARD: {
            **both,
            "kept activations": activations.kept,
            "temporaries of one layer": activations.temporary,
        }
    }
    reduction = {
        **both,
        SHARDED_GRADIENTS: shards,
        "gradient reduction buffers": row_numel(states, pp) * sizes.gradient,
    }
    return backward, {REDUCTION: reduction}


def _update_scratch(
    states: ChunkStates, muon: Floats, pp: int, sizes: Bytes, capability: Capability
) -> Floats:
    """Temporaries of the kind of update that makes most."""
    copies = 0 if sizes.updates_in_one else ADAMW_COPIES
    updated = by_rank(states.largest_adamw, pp).max(axis=1)
    if sizes.hosted:  # slice by slice
        updated = np.minimum(updated, capability.offload_slice_elements)
    result: Floats = np.maximum(updated * copies * 4, _muon_scratch(states, muon, pp))
    return result


def _muon_scratch(states: ChunkStates, muon: Floats, pp: int) -> Floats:
    """Directions of a round, which its updates replace, and what Newton-Schulz works with."""
    largest = by_rank(states.largest_muon, pp).max(axis=1)
    whole = np.maximum(largest, by_rank(states.largest_matrix, pp).max(axis=1))
    directions = np.minimum(muon * 4, ROUND_BYTES + largest * 4)
    # Matrices that ranks cut come together on their owner beside the blocks that it holds.
    gathered = np.where(whole > largest, np.minimum(ROUND_BYTES, muon * 4), 0.0)
    worked_on = np.minimum(np.maximum(whole, muon), SLICE_ELEMENTS)  # matrices of one shape go together
    result: Floats = directions + gathered + worked_on * NEWTON_SCHULZ_BYTES
    return result


def _staged(adamw: Floats, muon: Floats, sizes: Bytes, slice_elements: int) -> Floats:
    """Two slices of every kind of the optimizer that has most: they take turns."""

    def slices(elements: Floats, width: int) -> Floats:
        result: Floats = 2 * np.minimum(elements, slice_elements) * width
        return result

    return np.maximum(slices(adamw, 2 * sizes.moment), slices(muon, sizes.moment))


def stays_gathered(gathered_bytes: Floats, capability: Capability) -> Floats:
    """What a rank keeps gathered, of [layouts, own chunks, ranks]: all, or the largest few torch allows."""
    active = capability.active_stages_gathered
    held: Floats = np.sort(gathered_bytes, axis=1)[:, -active:].sum(axis=1)
    return held


def kept_activations(saved: Floats, micro_batches: Ints) -> Floats:
    """Kept activations at the worst moment of each rank's schedule, of [layouts, own chunks, ranks]."""
    layouts, virtual, pp = saved.shape
    if virtual == 1:
        return kept_by_single_chunks(saved, np.full(layouts, pp), micro_batches)
    result = np.empty((layouts, pp))
    enough = steady(pp, virtual, micro_batches)
    for count in distinct(enough):
        rows = enough == count
        points = in_flight(pp, virtual, count).astype(float)  # [pp, moments, virtual]
        # [ranks, layouts, virtual] @ [ranks, virtual, moments]
        held = np.matmul(saved[rows].transpose(2, 0, 1), points.transpose(0, 2, 1))
        result[rows] = held.max(axis=2).T
    return result


def at_worst_moment(saved: Floats, beyond: Floats, micro_batches: Ints) -> tuple[Floats, Floats]:
    """Kept activations, and what the backward that begins then adds to them, when each rank has most of both.

    `saved` and `beyond` [layouts, own chunks, ranks] are of one micro-batch: what each chunk keeps, and what
    its backward adds at most, less what it has freed by then. [layouts, ranks] each.
    """
    layouts, virtual, pp = saved.shape
    if virtual == 1:
        return kept_by_single_chunks(saved, np.full(layouts, pp), micro_batches), beyond[:, 0]
    kept, added = np.empty((layouts, pp)), np.empty((layouts, pp))
    enough = steady(pp, virtual, micro_batches)
    for count in distinct(enough):
        rows = enough == count
        points, chunk = backward_moments(pp, virtual, count)
        kept[rows], added[rows] = worst_of(saved[rows], beyond[rows], points, chunk)
    return kept, added


def worst_of(sizes: Floats, beyond: Floats, points: Ints, which: Ints) -> tuple[Floats, Floats]:
    """Of moments [ranks, moments, sizes] with an addition `which` [ranks, moments] each, the largest sum's
    parts, [layouts, ranks]; `sizes` and `beyond` [layouts, sizes or additions, ranks]."""
    # [ranks, layouts, sizes] @ [ranks, sizes, moments]
    held = np.matmul(sizes.transpose(2, 0, 1), points.astype(float).transpose(0, 2, 1))
    index = np.broadcast_to(which[:, None], held.shape)
    added = np.take_along_axis(beyond.transpose(2, 0, 1), index, axis=2)
    worst = (held + added).argmax(axis=2)[..., None]
    kept, most = (np.take_along_axis(each, worst, axis=2)[..., 0].T for each in (held, added))
    return kept, most


def kept_by_single_chunks(saved: Floats, pp: Ints, micro_batches: Ints) -> Floats:
    """The same of ranks with one chunk each, of [layouts, 1, most ranks]; beyond `pp` nothing is kept."""
    in_flight_of_rank = np.minimum(pp[:, None] - np.arange(saved.shape[2]), micro_batches[:, None])
    kept: Floats = in_flight_of_rank * saved[:, 0]
    return kept


def receive_buffers(
    received: Floats, returned: Floats, micro_batches: Ints, capability: Capability
) -> Floats:
    """Buffers that hidden states and their gradients are received in, of [layouts, own chunks, ranks]."""
    layouts, _, pp = received.shape
    if pp == 1:
        return np.zeros((layouts, 1))
    whole_step = capability.receive_buffers == "per_micro_batch"
    buffers = micro_batches if whole_step else np.minimum(pp, micro_batches)
    held: Floats = (received + returned).sum(axis=1) * buffers[:, None]
    return held


@frozen
class Peaks:
    """Per layout and pipeline rank."""

    allocated: Floats
    reserved: Floats
    peak: Floats
    upper: Floats
    moment: npt.NDArray[np.int64]


def peaks(terms: MemoryTerms, efficiency: Efficiency, capacity_bytes: int) -> Peaks:
    """What the device must have: allocated, what the caching allocator reserves for it, and outside.

    On a full device the allocator gives pools' free pages back before it fails: there it reserves less.
    """
    allocated, moment = terms.allocated()
    outside = np.sum(list(terms.outside.values()), axis=0)[:, None]
    least = allocated * efficiency.fragmentation + ALLOCATOR_SLACK_BYTES
    wanted = terms.reserved * efficiency.fragmentation + ALLOCATOR_SLACK_BYTES
    reserved = np.maximum(least, np.minimum(wanted, capacity_bytes - outside))
    uncertain = np.take_along_axis(np.stack(list(terms.uncertain.values())), moment[None], axis=0)[0]
    high = (terms.reserved + efficiency.activation_error * uncertain) * efficiency.fragmentation_upper
    upper = high + ALLOCATOR_SLACK_BYTES + outside + efficiency.upper_outside_bytes
    return Peaks(allocated, reserved, reserved + outside, upper, moment)
