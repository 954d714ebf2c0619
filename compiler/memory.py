"""Memory of every pipeline rank at the moments of a step that can be its peak.

Vectorised over layouts of one number of chunks: every item has shape [layouts, pipeline ranks]. The
search adds items up; a plan lists them. One code path, so that what is listed is what was searched by.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler.evaluate_states import Bytes
from shipway.compiler.frozen import frozen
from shipway.compiler.schedule import in_flight, steady
from shipway.compiler.unique import distinct
from shipway.schemas.calibration import Efficiency
from shipway.schemas.capability import Capability

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BACKWARD = "backward begins with every micro-batch in flight"
BACKWARD_END = "backward ends"
REDUCTION = "gradients are reduced after the last backward"
ROOT = "gradients of embedding and head are reduced"
OPTIMIZER = "optimizer step"

STAGED_STATE = "slices of offloaded optimizer state"
STAGED_ACTIVATIONS = "offloaded activations under way"

WHOLE_GRADIENTS = "gradients, whole until the last micro-batch"

ALLOCATOR_SLACK_BYTES = 64 * 2**20
"""The last, partly used segments of the caching allocator's pools (2 and 20 MiB)."""
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
    largest_row_gathered: Floats
    largest_row_numel: Floats
    root_gathered: Floats
    """[layouts, 1]: bytes of embedding and head, which FSDP takes as one group, and keeps gathered."""
    root_numel: Floats
    """[layouts, 1]: their parameters, whose gradients are reduced last of all."""
    largest_matrix: Floats
    largest_adamw: Floats
    largest_muon: Floats
    counters: Floats
    """Bytes of routers' counters between two balancing updates."""


@frozen
class ChunkActivations:
    """Per layout and chunk, bytes of one micro-batch on one rank."""

    kept: Floats
    """[layouts, ranks]: of all micro-batches, at the worst moment of each rank's schedule."""
    temporary: Floats
    """Largest over the chunk's rows of scratch and what recomputation holds again; without a pipeline over
    layers, less what backward has freed before it gets there."""
    late: Floats
    """The same, nothing deducted: of a layer near the model's beginning."""
    head: Floats
    """[layouts, 1]: the head's, in the last forward; 0 under a pipeline, where `temporary` has it."""
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
    outside: dict[str, Floats],
    pp: int,
    zero: Ints,
    micro_batches: Ints,
    sizes: Bytes,
    capability: Capability,
) -> MemoryTerms:
    """All items of all moments."""
    whole = by_rank(states.whole_numel, pp).sum(axis=1)
    shard = by_rank(states.shard_numel, pp).sum(axis=1)
    adamw = by_rank(states.adamw_numel, pp).sum(axis=1)
    muon = by_rank(states.muon_numel, pp).sum(axis=1)
    row_gathered = by_rank(states.largest_row_gathered, pp).max(axis=1)
    row_numel = by_rank(states.largest_row_numel, pp).max(axis=1)
    kept = {
        "master weights": shard * sizes.master,
        "optimizer state": (2 * adamw + muon) * sizes.moment_here,
        "routers' counters": by_rank(states.counters, pp).sum(axis=1),
    }
    if sizes.average:
        kept["moving average of weights"] = shard * sizes.average
    shard_gradients = shard * sizes.master
    gathered = _gathered(states, row_gathered, pp, zero, capability)
    held_activations = activations.kept
    temporary = by_rank(activations.temporary, pp).max(axis=1)
    stream = np.broadcast_to(2 * activations.hidden[:, None], temporary.shape)
    handed_over = by_rank(activations.received, pp), by_rank(activations.returned, pp)
    buffers = receive_buffers(*handed_over, micro_batches, capability)
    reduce_buffer = row_numel * (sizes.gradient + sizes.compute)
    matrices = _muon_scratch(states, muon, pp)
    copies = 0 if sizes.updates_in_one else ADAMW_COPIES
    updated = by_rank(states.largest_adamw, pp).max(axis=1)
    if sizes.hosted:  # slice by slice
        updated = np.minimum(updated, capability.offload_slice_elements)
    divided = updated * copies * 4
    accumulates = (micro_batches > 1)[:, None]

    if pp == 1:
        until_last = (zero == 1)[:, None]
        in_backward = {
            "gradients, sharded": np.where(accumulates & ~until_last, shard_gradients, 0.0),
            WHOLE_GRADIENTS: np.where(accumulates & until_last, whole * sizes.gradient, 0.0),
        }
        root = states.root_numel
        last = {
            BACKWARD_END: {
                **kept,
                "gradients, sharded": shard_gradients * (1 - root / whole),
                "gathered parameters": states.root_gathered + 2 * row_gathered,
                "gradient reduction buffers": reduce_buffer,
                "temporaries of one layer": by_rank(activations.late, pp).max(axis=1),
                "gradients of hidden states": stream,
            },
            ROOT: {
                **kept,
                "gradients, sharded": shard_gradients,
                "gradient reduction buffers": root * sizes.gradient,
                "gradients of hidden states": stream,
            },
        }
        at_head = activations.head > temporary + reduce_buffer + stream
        temporary = np.where(at_head, activations.head, temporary)
        stream = np.where(at_head, 0.0, stream)
        # What was reduced last waits for the next reduction: that of the head, through the next forward.
        waiting = np.where(accumulates & ~until_last, root * sizes.gradient, 0.0)
        reduce_now = np.where(at_head, 0.0, reduce_buffer) + waiting
    else:
        in_backward = {WHOLE_GRADIENTS: whole * sizes.gradient}
        last = {
            REDUCTION: {
                **kept,
                **in_backward,
                "gradients, sharded": shard_gradients,
                "gathered parameters": gathered,
                "gradient reduction buffers": row_numel * sizes.gradient,
                "pipeline receive buffers": buffers,
            }
        }
        reduce_now = row_numel * sizes.compute
    moments = {
        BACKWARD: {
            **kept,
            **in_backward,
            "gathered parameters": gathered,
            "kept activations": held_activations,
            "temporaries of one layer": temporary,
            "gradients of hidden states": stream,
            "gradient reduction buffers": reduce_now,
            "pipeline receive buffers": buffers,
        },
        **last,
        OPTIMIZER: {
            **kept,
            "gradients, sharded": shard_gradients,
            "optimizer temporaries": np.maximum(divided, matrices),
            "pipeline receive buffers": buffers,
        },
    }
    if sizes.hosted:
        each = capability.offload_slice_elements
        moments[OPTIMIZER][STAGED_STATE] = _staged(adamw, muon, sizes, each)
    if activations.staged.any():
        moments[BACKWARD][STAGED_ACTIVATIONS] = np.broadcast_to(activations.staged[:, None], temporary.shape)
    uncertain = {name: np.zeros_like(shard) for name in moments}
    uncertain[BACKWARD] = held_activations + temporary + stream
    return MemoryTerms(moments, outside, uncertain)


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


def _gathered(
    states: ChunkStates, row_gathered: Floats, pp: int, zero: Ints, capability: Capability
) -> Floats:
    """Parameters in compute precision: the running and the prefetched row, or all that stays gathered."""
    if pp > 1:
        return stays_gathered(by_rank(states.gathered_bytes, pp), capability)
    everything = states.gathered_bytes.sum(axis=1, keepdims=True)
    two = np.minimum(states.root_gathered + 2 * row_gathered, everything)
    held: Floats = np.where((zero == 3)[:, None], two, everything)
    return held


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


def peaks(terms: MemoryTerms, efficiency: Efficiency) -> Peaks:
    """What the device must have: allocated, what the caching allocator reserves for it, and outside."""
    allocated, moment = terms.allocated()
    outside = np.sum(list(terms.outside.values()), axis=0)[:, None]
    reserved = allocated * efficiency.fragmentation + ALLOCATOR_SLACK_BYTES
    uncertain = np.take_along_axis(np.stack(list(terms.uncertain.values())), moment[None], axis=0)[0]
    high = (allocated + efficiency.activation_error * uncertain) * efficiency.fragmentation_upper
    upper = high + ALLOCATOR_SLACK_BYTES + outside + efficiency.upper_outside_bytes
    return Peaks(allocated, reserved, reserved + outside, upper, moment)
