"""A step's backward without a pipeline, layer by layer: what is alive when each layer needs most.

FSDP has every layer as a group and, inside it, its experts and its router (runtime/parallel/data.py); the
embedding and the head are the root's, gathered to the end and reduced last of all.
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
    """Of each layer on one rank, [layouts, layers], and of embedding and head together, [layouts, 1]."""

    gathered_bytes: Floats
    whole_numel: Floats
    shard_numel: Floats
    experts_whole: Floats
    experts_shard: Floats
    root_gathered: Floats
    root_whole: Floats
    root_shard: Floats


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
    shared, own, cell = chunked.shared, chunked.own, chunked.cell
    parts, rows = shared.parts, shared.work.layer_rows
    saved = shared.under_each_policy("saved")[own.recompute * len(shared.cells) + cell]
    kept = saved[:, 1:].copy()
    kept[:, -1] -= parts.saved[own.recompute, LAST, cell]
    kept += parts.head_gradient[cell][:, None]
    times = (parts.early, parts.reducing, parts.late, parts.closing)
    again = (parts.saved[:1] - parts.saved)[own.recompute, :, cell][:, rows]
    early, reducing, late, closing = (peaks[rows][:, cell].T + again for peaks in times)
    early = parts.beyond(parts.early)[own.recompute, :, cell][:, rows]
    head = parts.beyond(parts.whole)[own.recompute, LAST, cell]
    return LayerActivations(kept, early, reducing, late, closing, saved[:, -1:], head[:, None])


def layer_states(chunked: Chunked) -> LayerStates:
    """Of layouts without a pipeline."""
    states, rows, which = chunked.shared.states, chunked.shared.work.layer_rows, chunked.sharding
    expert_ranks = chunked.shared.shardings.expert

    def layers(per_row: Floats) -> Floats:
        result: Floats = per_row[rows][:, which].T
        return result

    def root(per_row: Floats) -> Floats:
        result: Floats = per_row[[FIRST, LAST]][:, which].sum(axis=0)[:, None]
        return result

    return LayerStates(
        gathered_bytes=layers(states.gathered_bytes),
        whole_numel=layers(states.whole_numel),
        shard_numel=layers(states.shard_numel),
        experts_whole=layers(states.expert_numel),
        experts_shard=layers(states.expert_numel / expert_ranks),
        root_gathered=root(states.gathered_bytes),
        root_whole=root(states.whole_numel),
        root_shard=root(states.shard_numel),
    )


def layer_moments(
    activations: LayerActivations, states: LayerStates, zero: Ints, micro_batches: Ints, sizes: Bytes
) -> LayerMoments:
    """The last micro-batch's backward, which has all gradients beside it that any other has."""
    accumulates, until_last = (micro_batches > 1)[:, None], (zero == 1)[:, None]
    adds_to_shards = accumulates & ~until_last
    shards = states.shard_numel * sizes.master
    all_shards = shards.sum(axis=1, keepdims=True) + states.root_shard * sizes.master
    whole = states.whole_numel * sizes.gradient
    whole_root = states.root_whole * sizes.gradient
    whole_here = np.where(accumulates & until_last, np.cumsum(whole, axis=1) + whole_root, 0.0)
    # What is reduced waits in a buffer for the next reduction: that of the layer behind, or of the root.
    rest = (states.whole_numel - states.experts_whole) * sizes.gradient
    behind = np.concatenate([rest[:, 1:], np.where(adds_to_shards, whole_root, 0.0)], axis=1)
    freed = states.experts_whole * sizes.compute  # gathered: FSDP lets go of it before it reduces
    times = np.stack(
        [
            activations.early + behind,
            activations.reducing - freed,
            activations.late - freed,
            activations.closing - states.gathered_bytes,
        ]
    )
    none = np.zeros_like(shards)
    own_shards = np.stack([none, none, states.experts_shard * sizes.master, shards])
    new = np.where(adds_to_shards, 0.0, own_shards)
    in_layer = {
        WHOLE_GRADIENTS: whole_here,
        "gathered parameters": _gathered(states, zero),
        "kept activations": activations.kept,
        "temporaries of one layer": times.max(axis=0),
    }
    default_stream = np.sum(list(in_layer.values()), axis=0).max(axis=1, keepdims=True)
    in_layer["temporaries of one layer"] = (times + new).max(axis=0)
    in_layer[SHARDED_GRADIENTS] = np.where(adds_to_shards, all_shards, _after(shards))
    worst = np.sum(list(in_layer.values()), axis=0).argmax(axis=1)[:, None]
    waiting = np.where(adds_to_shards, whole_root, 0.0)
    everything = states.root_gathered + states.gathered_bytes.sum(axis=1, keepdims=True)
    reduced = np.maximum(states.root_gathered - states.root_shard * sizes.master, 0.0)
    at_head = {
        SHARDED_GRADIENTS: np.where(adds_to_shards, all_shards, 0.0),
        WHOLE_GRADIENTS: whole_here[:, -1:],
        "gathered parameters": np.where((zero == 3)[:, None], states.root_gathered, everything),
        "kept activations": activations.all_kept,
        "temporaries of one layer": activations.head,
        "gradient reduction buffers": waiting,
    }
    head_stream = np.sum([v for k, v in at_head.items() if k != SHARDED_GRADIENTS], axis=0)
    return LayerMoments(
        {name: np.take_along_axis(values, worst, axis=1) for name, values in in_layer.items()},
        worst,
        at_head,
        {SHARDED_GRADIENTS: all_shards, "gradient reduction buffers": whole_root + reduced},
        np.maximum(np.maximum(default_stream, head_stream), whole_root + reduced),
    )


def _after(per_layer: Floats) -> Floats:
    """[layouts, layers]: sums over the layers behind each."""
    return np.cumsum(per_layer[:, ::-1], axis=1)[:, ::-1] - per_layer


def _gathered(states: LayerStates, zero: Ints) -> Floats:
    """Of layers that backward has not left; under ZeRO 3 of the one it is in and the one before it."""
    one = states.gathered_bytes
    before = np.concatenate([np.zeros_like(one[:, :1]), one[:, :-1]], axis=1)
    held = np.where((zero == 3)[:, None], one + before, np.cumsum(one, axis=1))
    result: Floats = states.root_gathered + held
    return result
