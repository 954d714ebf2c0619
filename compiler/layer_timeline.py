"""A step's backward without a pipeline, layer by layer: what is alive when each layer needs most.

Of each kind of layer the first and the last are looked at: between them what is kept falls and what is
reduced grows evenly. FSDP has every layer as a group and, inside it, its experts and its router
(runtime/parallel/data.py); the embedding and the head are the root's, gathered to the end and reduced last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler.chunked import Chunked
from shipway.compiler.evaluate_states import Bytes
from shipway.compiler.frozen import frozen
from shipway.compiler.workload import FIRST, LAST

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


SHARDED_GRADIENTS = "gradients, sharded"
WHOLE_GRADIENTS = "gradients, whole until the last micro-batch"


@frozen(eq=False)
class LayerActivations:
    """Bytes of one micro-batch."""

    kept: Floats
    """[layouts, layers]: by the layer, all before it and the head, which backward has passed."""
    early: Floats
    """[layouts, layers]: beside them, until gradients of the layer's own are reduced..."""
    reducing: Floats
    """...when those of its experts are, from a copy..."""
    late: Floats
    """...from then on..."""
    closing: Floats
    """...and at its end."""
    all_kept: Floats
    """[layouts, 1]: when forward ends."""
    head: Floats
    """[layouts, 1]: beside it, at the head."""


@frozen(eq=False)
class LayerStates:
    """On one rank: of each layer [layouts, layers], and of embedding and head together [layouts, 1]."""

    gathered_bytes: Floats
    gathered_before: Floats
    """Of the layer before it, 0 for the first."""
    gathered_ahead: Floats
    """Of it, all before it, embedding and head."""
    whole_ahead: Floats
    """Parameters of the same."""
    rest_behind: Floats
    """Parameters of the layer behind it but its experts, 0 for the last."""
    shard_numel: Floats
    shards_behind: Floats
    """Of all layers behind it."""
    experts_whole: Floats
    experts_shard: Floats
    root_gathered: Floats
    root_whole: Floats
    root_shard: Floats
    all_shards: Floats
    all_gathered: Floats


@frozen(eq=False)
class LayerMoments:
    """Items at the worst layer of backward and at the head, each [layouts, 1]."""

    in_layer: dict[str, Floats]
    layer: Ints
    """[layouts, 1]: that layer."""
    at_head: dict[str, Floats]
    after: dict[str, Floats]
    """When the root's gradients are reduced."""
    default_stream: Floats
    """[layouts, 1]: most that backward has of the default stream's: all but shards of gradients."""


def layer_activations(chunked: Chunked) -> LayerActivations:
    """Of layouts without a pipeline."""
    shared, own, cell, layers = chunked.shared, chunked.own, chunked.cell, chunked.shared.work.telling_layers
    parts, rows = shared.parts, shared.work.layer_rows[layers]
    saved = shared.under_each_policy("saved")[own.recompute * len(shared.cells) + cell]
    kept = saved[:, layers + 1]
    kept[:, -1] -= parts.saved[own.recompute, LAST, cell]
    kept += parts.peaks.head_gradient[cell][:, None]
    again = (parts.saved[:1] - parts.saved)[:, rows][own.recompute, :, cell]
    times = (parts.peaks.reducing, parts.peaks.late, parts.peaks.closing)
    reducing, late, closing = (peaks[rows][:, cell].T + again for peaks in times)
    early = parts.beyond(parts.peaks.early)[:, rows][own.recompute, :, cell]
    head = parts.beyond_whole[own.recompute, LAST, cell]
    return LayerActivations(kept, early, reducing, late, closing, saved[:, -1:], head[:, None])


def layer_states(chunked: Chunked) -> LayerStates:
    """Of layouts without a pipeline."""
    shared, which, layers = chunked.shared, chunked.sharding, chunked.shared.work.telling_layers
    states, rows = shared.states, shared.work.layer_rows
    none = np.full(1, -1)
    ahead, behind = np.append(none, rows)[layers], np.append(rows[1:], none)[layers]

    def at(per_row: Floats, of: Ints) -> Floats:
        result: Floats = np.where(of >= 0, per_row[of].T, 0.0)[which]
        return result

    def ends(per_row: Floats) -> Floats:
        result: Floats = per_row[[FIRST, LAST]].sum(axis=0)[which][:, None]
        return result

    def with_root(name: str) -> Floats:
        """Of embedding, head and the layers up to each."""
        sums, last = shared.running(name)[which][:, layers + 1], getattr(states, name)[LAST][which]
        sums[:, :-1] += last[:, None]
        return sums

    shards = with_root("shard_numel")
    gathered = with_root("gathered_bytes")
    return LayerStates(
        gathered_bytes=at(states.gathered_bytes, rows[layers]),
        gathered_before=at(states.gathered_bytes, ahead),
        gathered_ahead=gathered,
        whole_ahead=with_root("whole_numel"),
        rest_behind=at(states.whole_numel - states.expert_numel, behind),
        shard_numel=at(states.shard_numel, rows[layers]),
        shards_behind=shards[:, -1:] - shards,
        experts_whole=at(states.expert_numel, rows[layers]),
        experts_shard=at(states.expert_numel / shared.shardings.expert, rows[layers]),
        root_gathered=ends(states.gathered_bytes),
        root_whole=ends(states.whole_numel),
        root_shard=ends(states.shard_numel),
        all_shards=shards[:, -1:],
        all_gathered=gathered[:, -1:],
    )


def layer_moments(
    activations: LayerActivations,
    states: LayerStates,
    layers: Ints,
    zero: Ints,
    micro_batches: Ints,
    sizes: Bytes,
) -> LayerMoments:
    """The last micro-batch's backward, which has all gradients beside it that any other has."""
    accumulates, until_last = (micro_batches > 1)[:, None], (zero == 1)[:, None]
    adds_to_shards = accumulates & ~until_last
    all_shards = states.all_shards * sizes.master
    whole_root = states.root_whole * sizes.gradient
    whole_here = np.where(accumulates & until_last, states.whole_ahead * sizes.gradient, 0.0)
    # What is reduced waits in a buffer for the next reduction: that of the layer behind, or of the root.
    behind = states.rest_behind * sizes.gradient
    behind[:, -1:] = np.where(adds_to_shards, whole_root, 0.0)
    freed = states.experts_whole * sizes.compute  # gathered: FSDP lets go of it before it reduces
    early = np.maximum(activations.early + behind, activations.reducing - freed)
    late, closing = activations.late - freed, activations.closing - states.gathered_bytes
    two = states.root_gathered + states.gathered_bytes + states.gathered_before
    in_layer = {
        WHOLE_GRADIENTS: whole_here,
        "gathered parameters": np.where((zero == 3)[:, None], two, states.gathered_ahead),
        "kept activations": activations.kept,
        "temporaries of one layer": np.maximum(early, np.maximum(late, closing)),
    }
    default_stream = sum(in_layer.values(), np.zeros(1)).max(axis=1, keepdims=True)
    own = np.where(adds_to_shards, 0.0, sizes.master)  # shards of the layer itself, once they are reduced
    late, closing = late + states.experts_shard * own, closing + states.shard_numel * own
    in_layer["temporaries of one layer"] = np.maximum(early, np.maximum(late, closing))
    in_layer[SHARDED_GRADIENTS] = np.where(adds_to_shards, all_shards, states.shards_behind * sizes.master)
    worst = sum(in_layer.values(), np.zeros(1)).argmax(axis=1)[:, None]
    waiting = np.where(adds_to_shards, whole_root, 0.0)
    reduced = np.maximum(states.root_gathered - states.root_shard * sizes.master, 0.0)
    at_head = {
        SHARDED_GRADIENTS: np.where(adds_to_shards, all_shards, 0.0),
        WHOLE_GRADIENTS: whole_here[:, -1:],
        "gathered parameters": np.where((zero == 3)[:, None], states.root_gathered, states.all_gathered),
        "kept activations": activations.all_kept,
        "temporaries of one layer": activations.head,
        "gradient reduction buffers": waiting,
    }
    others = (values for name, values in at_head.items() if name != SHARDED_GRADIENTS)
    head_stream = sum(others, np.zeros(1))
    return LayerMoments(
        {name: np.take_along_axis(values, worst, axis=1) for name, values in in_layer.items()},
        layers[worst],
        at_head,
        {SHARDED_GRADIENTS: all_shards, "gradient reduction buffers": whole_root + reduced},
        np.maximum(np.maximum(default_stream, head_stream), whole_root + reduced),
    )
