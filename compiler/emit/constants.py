"""The resolved constants at the top of a generated model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from shipway.schemas.model import (
    DeltaAttention,
    Experts,
    GroupedAttention,
    LatentAttention,
    Model,
    Position,
    SituActivation,
    Vision,
    Yarn,
)

PAGE_TOKENS = 64
"""Tokens in one page of the cache that generation keeps."""
VISION_THETA = 10000.0
"""Base of the wavelengths of the vision tower's rotary embedding (MoonViT, arXiv 2504.07491)."""


class Constant(NamedTuple):
    """One line: NAME = value  # comment."""

    name: str
    value: str
    comment: str = ""


def constants(model: Model, kinds: Kinds) -> tuple[Constant, ...]:
    """Every constant that the blocks of `model` name, and no other."""
    return tuple(_constants(model, kinds))


class Kinds(NamedTuple):
    """Which kinds of block occur in a model, in the order of the schema."""

    attention: tuple[str, ...]
    feed_forward: tuple[str, ...]


def kinds_of(model: Model) -> Kinds:
    """Kinds of attention and of feed-forward that `model` has."""
    attention, feed_forward = set(model.attention_kinds()), set(model.feed_forward_kinds())
    return Kinds(
        tuple(kind for kind in ("delta", "latent", "grouped") if kind in attention),
        tuple(kind for kind in ("dense", "experts") if kind in feed_forward),
    )


def _constants(model: Model, kinds: Kinds) -> Iterator[Constant]:
    yield Constant("VOCABULARY", f"{model.vocabulary}")
    yield Constant("WIDTH", f"{model.width}", "D")
    yield Constant("LAYERS", f"{model.layers}")
    if len(kinds.attention) > 1:
        yield Constant("ATTENTION", mix_expression(model.attention_kinds()), "of each layer")
    if len(kinds.feed_forward) > 1:
        yield Constant("FEED_FORWARD", mix_expression(model.feed_forward_kinds()), "of each layer")
    if model.residual.kind == "block":
        yield Constant("BLOCK_LAYERS", f"{model.residual.block_layers}", "of attention residuals")
    yield Constant("NORM_EPS", f"{model.norm_eps}")
    yield Constant("INIT_STD", f"{model.init_std}")
    if model.attention.delta is not None and "delta" in kinds.attention:
        yield from _delta(model.attention.delta)
    if model.attention.latent is not None and "latent" in kinds.attention:
        yield from _latent(model.attention.latent)
    if model.attention.grouped is not None and "grouped" in kinds.attention:
        yield from _grouped(model.attention.grouped)
    if model.feed_forward.dense_inner_width is not None and "dense" in kinds.feed_forward:
        width = model.feed_forward.dense_inner_width
        yield Constant("DENSE_WIDTH", f"{width}", "inner, of dense layers")
    if model.feed_forward.experts is not None and "experts" in kinds.feed_forward:
        yield from _experts(model.feed_forward.experts)
    if isinstance(model.feed_forward.activation, SituActivation):
        activation = model.feed_forward.activation
        yield Constant("SITU_BETA", f"{activation.beta}", "soft cap of the gate half")
        yield Constant("SITU_LINEAR_BETA", f"{activation.linear_beta}", "soft cap of the linear half")
    if model.multi_token_prediction is not None:
        prediction = model.multi_token_prediction
        yield Constant("PREDICTION_DEPTH", f"{prediction.depth}", "further tokens predicted")
        yield Constant("PREDICTION_WEIGHT", f"{prediction.loss_weight}")
    if model.vision is not None:
        yield from _vision(model.vision, model.vocabulary)
    if {"latent", "grouped"} & set(kinds.attention):
        yield Constant("PAGE_TOKENS", f"{PAGE_TOKENS}", "tokens in a page of the cache that generation keeps")


def _delta(delta: DeltaAttention) -> Iterator[Constant]:
    yield Constant("DELTA_HEADS", f"{delta.heads}", "H")
    if delta.value_heads not in (None, delta.heads):
        yield Constant("DELTA_VALUE_HEADS", f"{delta.value_heads}", "Hv")
    yield Constant("DELTA_KEY_WIDTH", f"{delta.key_width}", "K")
    yield Constant("DELTA_VALUE_WIDTH", f"{delta.value_width}", "V")
    yield Constant("CONVOLUTION_WIDTH", f"{delta.convolution_width}", "taps")
    yield Constant("DECAY_RANK", f"{delta.decay_rank}")
    bounded = delta.decay.kind == "bounded"
    minimum = delta.decay.minimum if delta.decay.kind == "bounded" else None
    yield Constant("DECAY_MINIMUM", f"{minimum}", "log-decay of one token" if bounded else "unbounded")
    yield Constant("DELTA_CHUNK", f"{delta.chunk}", "tokens handled as one dense block")


def _latent(latent: LatentAttention) -> Iterator[Constant]:
    yield Constant("LATENT_HEADS", f"{latent.heads}", "H")
    if latent.query_rank is not None:
        yield Constant("QUERY_RANK", f"{latent.query_rank}")
    yield Constant("KV_RANK", f"{latent.kv_rank}", "R")
    yield Constant("OWN_KEY_WIDTH", f"{latent.nope_width}", "Kn, from the latent")
    if latent.rope_width:
        yield Constant("SHARED_KEY_WIDTH", f"{latent.rope_width}", "Kr, shared by all heads")
    shared = " + SHARED_KEY_WIDTH" if latent.rope_width else ""
    yield Constant("LATENT_KEY_WIDTH", "OWN_KEY_WIDTH" + shared)
    yield Constant("LATENT_VALUE_WIDTH", f"{latent.value_width}", "V")
    if latent.norm_eps is not None:
        yield Constant("LATENT_NORM_EPS", f"{latent.norm_eps}")
    yield from _position("LATENT", "LATENT_KEY_WIDTH", latent.position)


def _grouped(grouped: GroupedAttention) -> Iterator[Constant]:
    yield Constant("QUERY_HEADS", f"{grouped.heads}", "H")
    yield Constant("KV_HEADS", f"{grouped.kv_heads}", "Hkv")
    yield Constant("HEAD_WIDTH", f"{grouped.head_width}", "K")
    yield from _position("HEAD", "HEAD_WIDTH", grouped.position)


def _position(prefix: str, width: str, position: Position) -> Iterator[Constant]:
    """Rotary constants, and the softmax scale, which YaRN changes."""
    scale = f"{width}**-0.5"
    if position.kind == "rotary":
        yield Constant(f"{prefix}_THETA", f"{position.theta}", "base of the rotary wavelengths")
        if position.yarn is not None:
            yield Constant(f"{prefix}_YARN", _yarn(position.yarn))
            scale += f" * {prefix}_YARN.softmax_factor"
    yield Constant(f"{prefix}_SCALE", scale)


def _yarn(yarn: Yarn) -> str:
    fields = ("factor", "original_context", "beta_fast", "beta_slow", "attention_scale")
    return "Yarn(" + ", ".join(f"{field}={getattr(yarn, field)}" for field in fields) + ")"


def _experts(experts: Experts) -> Iterator[Constant]:
    yield Constant("EXPERTS", f"{experts.routed}", "E")
    yield Constant("ACTIVE_EXPERTS", f"{experts.active}", "k, per token")
    yield Constant("EXPERT_WIDTH", f"{experts.inner_width}", "F")
    if experts.latent_width is not None:
        yield Constant("EXPERT_LATENT_WIDTH", f"{experts.latent_width}", "L")
    if experts.shared:
        inner = experts.shared_inner_width or experts.inner_width
        value = f"{experts.shared} * {inner}" if experts.shared > 1 else f"{inner}"
        yield Constant("SHARED_WIDTH", value, "all shared experts as one gated unit")
    if experts.scale != 1:
        yield Constant("ROUTED_SCALE", f"{experts.scale}")
    if experts.active_groups < experts.groups:
        yield Constant("GROUPS", f"{experts.groups}")
        yield Constant("ACTIVE_GROUPS", f"{experts.active_groups}", "per token")
    match experts.balancing.kind:
        case "quantile" if experts.balancing.estimator == "histogram":
            yield Constant("MARGIN_BINS", f"{experts.balancing.bins}")
        case "bias":
            yield Constant("BALANCE_RATE", f"{experts.balancing.rate}")
        case "auxiliary":
            yield Constant("AUXILIARY_WEIGHT", f"{experts.balancing.weight}")


def _vision(vision: Vision, vocabulary: int) -> Iterator[Constant]:
    token = vocabulary - 1 if vision.image_token is None else vision.image_token
    yield Constant("IMAGE_TOKEN", f"{token}", "stands where an image's embeddings go")
    yield Constant("VISION_LAYERS", f"{vision.layers}")
    yield Constant("VISION_WIDTH", f"{vision.width}", "width")
    yield Constant("VISION_HEADS", f"{vision.heads}")
    yield Constant("VISION_HEAD_WIDTH", f"{vision.head_width}")
    yield Constant("VISION_SCALE", "VISION_HEAD_WIDTH**-0.5")
    yield Constant("VISION_THETA", f"{VISION_THETA}", "base of the rotary wavelengths")
    yield Constant("VISION_INNER_WIDTH", f"{vision.inner_width}")
    yield Constant("PATCH", f"{vision.patch}", "pixels on a side")
    yield Constant("POSITION_GRID", f"{vision.position_grid}", "G, learned positions on a side")
    yield Constant("MERGE", f"{vision.merge}", "patches on a side of what becomes one token")
    yield Constant("PROJECTOR_WIDTH", f"{vision.projector_width}")


def mix_expression(kinds: Sequence[str]) -> str:
    """A short Python expression for the kind of each layer: a head, a repeated pattern, a tail."""
    head, pattern, repeats = shortest_pattern(kinds)
    tail = kinds[head + pattern * repeats :]
    middle = _tuple(kinds[head : head + pattern])
    parts = [_tuple(kinds[:head]), f"{middle} * {repeats}" if repeats > 1 else middle, _tuple(tail)]
    return " + ".join(part for part in parts if part != "()")


def shortest_pattern(kinds: Sequence[str]) -> tuple[int, int, int]:
    """Length of the head, length of the pattern, repeats: those that leave the fewest names to write."""
    best = (len(kinds), 0, len(kinds), 1)
    for head in range(len(kinds)):
        for pattern in range(1, len(kinds) - head + 1):
            repeats = _repeats(kinds[head:], pattern)
            if repeats > 1:
                best = min(best, (len(kinds) - pattern * (repeats - 1), head, pattern, repeats))
    return best[1:]


def _repeats(kinds: Sequence[str], pattern: int) -> int:
    """How often the first `pattern` kinds follow one another from the start."""
    same = (kinds[i] == kinds[i % pattern] for i in range(len(kinds)))
    return sum(1 for _ in takewhile(bool, same)) // pattern


def _tuple(kinds: Sequence[str]) -> str:
    names = ", ".join(f'"{kind}"' for kind in kinds)
    return f"({names},)" if len(kinds) == 1 else f"({names})"
