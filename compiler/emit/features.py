"""What the docstring of a generated model says: the architecture's features, and the letters of shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shipway.compiler.emit.constants import Kinds
from shipway.schemas.model import DeltaAttention, Experts, GroupedAttention, LatentAttention, Model, Position


def features(model: Model, kinds: Kinds) -> tuple[str, ...]:
    """One line a feature, with the paper it comes from."""
    return tuple(_features(model, kinds))


def _features(model: Model, kinds: Kinds) -> Iterator[str]:
    head = "tied to the embedding" if model.tied_embeddings else "untied head"
    yield f"{model.layers} layers of width {model.width}, vocabulary of {model.vocabulary}, {head}"
    attention, feed_forward = Counter(model.attention_kinds()), Counter(model.feed_forward_kinds())
    if model.attention.delta is not None and "delta" in kinds.attention:
        yield f"{_layers(attention['delta'])}: {_delta(model.attention.delta)}"
    if model.attention.latent is not None and "latent" in kinds.attention:
        yield f"{_layers(attention['latent'])}: {_latent(model.attention.latent)}"
    if model.attention.grouped is not None and "grouped" in kinds.attention:
        yield f"{_layers(attention['grouped'])}: {_grouped(model.attention.grouped)}"
    if "dense" in kinds.feed_forward:
        width = model.feed_forward.dense_inner_width
        yield f"{_layers(feed_forward['dense'])}: dense feed-forward of inner width {width}"
    if model.feed_forward.experts is not None and "experts" in kinds.feed_forward:
        yield f"{_layers(feed_forward['experts'])}: {_experts(model.feed_forward.experts)}"
        yield _balancing(model.feed_forward.experts)
    match model.feed_forward.activation.kind:
        case "situ":
            yield "SiTU-GLU in all feed-forwards (arXiv 2607.24653, Eq. 12)"
        case "swiglu":
            yield "SwiGLU in all feed-forwards (arXiv 2002.05202)"
    match model.residual.kind:
        case "block":
            size = model.residual.block_layers
            yield f"attention residuals over blocks of {size} layers (arXiv 2603.15031)"
        case "full":
            yield "attention residuals over all sublayers (arXiv 2603.15031)"
        case "plain":
            yield "pre-norm residual stream"
    if model.multi_token_prediction is not None:
        depth = model.multi_token_prediction.depth
        tokens = f"{depth} further token{'s' * (depth > 1)}"
        yield f"multi-token prediction of {tokens} in training (arXiv 2412.19437)"
    if model.vision is not None:
        yield (
            f"vision tower of {model.vision.layers} layers at native resolution (MoonViT, arXiv 2504.07491),"
            " trained jointly"
        )


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def _delta(delta: DeltaAttention) -> str:
    decay = "bounded" if delta.decay.kind == "bounded" else "unbounded"
    values = delta.value_heads or delta.heads
    heads = f"{delta.heads} heads" if values == delta.heads else f"{delta.heads} key and {values} value heads"
    return f"Kimi Delta Attention (arXiv 2510.26692), {heads}, {decay} decay"


def _latent(latent: LatentAttention) -> str:
    gate = {"none": "", "elementwise": "gated ", "per_head": "gated (per head) "}[latent.output_gate]
    return (
        f"{gate}latent attention (arXiv 2405.04434), {latent.heads} heads, latent of {latent.kv_rank},"
        f" {_position(latent.position)}"
    )


def _grouped(grouped: GroupedAttention) -> str:
    norm = ", normalised queries and keys" * grouped.query_key_norm
    gate = {"none": "", "elementwise": "gated ", "per_head": "gated (per head) "}[grouped.output_gate]
    return (
        f"{gate}grouped-query attention (arXiv 2305.13245), {grouped.heads} heads on {grouped.kv_heads},"
        f" {_position(grouped.position)}{norm}"
    )


def _position(position: Position) -> str:
    if position.kind == "none":
        return "no positions (NoPE)"
    return "rotary positions" if position.yarn is None else "rotary positions with YaRN"


def _experts(experts: Experts) -> str:
    shared = f" and {experts.shared} shared" if experts.shared else ""
    if experts.latent_width is None:
        return f"mixture of experts, {experts.active} of {experts.routed} routed{shared}"
    return (
        f"Stable LatentMoE (arXiv 2601.18089), {experts.active} of {experts.routed} routed on a latent of"
        f" {experts.latent_width}{shared}"
    )


def _balancing(experts: Experts) -> str:
    match experts.balancing.kind:
        case "quantile":
            how = "quantile balancing (arXiv 2607.24653, 2.3.3)"
        case "bias":
            how = "auxiliary-loss-free balancing by a bias (arXiv 2412.19437)"
        case "auxiliary":
            how = "a load-balancing loss (arXiv 2101.03961)"
        case "none":
            how = "no balancing"
    return f"{experts.scores} router with {how}"


def legend(model: Model, kinds: Kinds) -> tuple[tuple[str, str], ...]:
    """Letters of the shapes in comments, and what they mean."""
    return tuple(_legend(model, kinds))


def _legend(model: Model, kinds: Kinds) -> Iterator[tuple[str, str]]:
    yield "B, T, N", "rows of the batch, tokens of a row, all tokens B * T"
    yield "D", "model width"
    delta = model.attention.delta if "delta" in kinds.attention else None
    latent = model.attention.latent if "latent" in kinds.attention else None
    yield "H, K, V", "heads, width of a key, width of a value"
    if delta is not None and delta.value_heads not in (None, delta.heads):
        yield "Hv", "value heads of delta attention"
    if latent is not None:
        shared = "Kr" if latent.rope_width else ""
        yield "R", "latent that keys and values are made from"
        yield (
            (f"Kn, {shared}" if shared else "Kn"),
            ("width of a head's own key" + (", and of the key that all heads share" if shared else "")),
        )
    if "grouped" in kinds.attention:
        yield "Hkv", "key and value heads"
    if model.feed_forward.experts is not None and "experts" in kinds.feed_forward:
        yield "E, k, F", "routed experts, of which each token takes k, inner width of one"
        if model.feed_forward.experts.latent_width is not None:
            yield "L", "latent width that routed experts work on"
    if model.residual.kind != "plain":
        yield "S", "sources over depth; in a cache, tokens kept"
    elif latent is not None or "grouped" in kinds.attention:
        yield "S", "tokens kept in a cache"
    if latent is not None or "grouped" in kinds.attention:
        yield "C", "values that a layer keeps of a token in a cache"
    if model.vision is not None:
        yield "P, G", "patches of all images, side of the grid of learned positions"
