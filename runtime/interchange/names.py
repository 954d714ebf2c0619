"""Published names of our tensors, and the layout that each has there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shipway.runtime.interchange.families import FamilyName, delta_of, family_of
from shipway.runtime.interchange.layouts import (
    Apart,
    Broadcast,
    InterleavedRotary,
    OneChannel,
    OtherHalfFirst,
    Padded,
    RowVector,
    Same,
    TensorLayout,
)
from shipway.schemas.model import Model

WHOLE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "output_residual.query": "model.output_attn_res_proj.weight",
    "output_residual.norm.weight": "model.output_attn_res_norm.weight",
}
LAYER = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention_residual.query": "self_attention_res_proj.weight",
    "attention_residual.norm": "self_attention_res_norm",
    "feed_forward_residual.query": "mlp_res_proj.weight",
    "feed_forward_residual.norm": "mlp_res_norm",
}
DELTA = {
    "q_conv": "q_conv1d",
    "k_conv": "k_conv1d",
    "v_conv": "v_conv1d",
    "decay_down": "f_a_proj",
    "decay_up": "f_b_proj",
    "a_log": "A_log",
    "beta_proj": "b_proj",
    "gate_proj": "g_proj",
    "gate_down": "g_a_proj",
    "gate_up": "g_b_proj",
    "output_norm": "o_norm",
    "output_proj": "o_proj",
}
LATENT = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "gate_proj": "g_proj",
    "output_proj": "o_proj",
}
FEED_FORWARD = {
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "router.weight": "gate.weight",
    "router.balance_bias": "gate.e_score_correction_bias",
    "shared.gate": "shared_experts.gate_proj",
    "shared.up": "shared_experts.up_proj",
    "shared.down": "shared_experts.down_proj",
    "latent_down": "routed_expert_down_proj",
    "latent_norm": "routed_expert_norm",
    "latent_up": "routed_expert_up_proj",
}
EXPERT = {
    "deepseek_v3": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "kimi_linear": {"gate": "w1", "up": "w3", "down": "w2"},
    "kimi_k3": {"gate": "w1", "up": "w3", "down": "w2"},
}
PREDICTION = {
    "hidden_norm": "hnorm",
    "embedding_norm": "enorm",
    "projection": "eh_proj",
    "norm": "shared_head.norm",
}
"""DeepSeek-V3's multi-token prediction: layers after the last, with these around an ordinary layer."""
PREDICTION_COPIES = {"embed_tokens.weight": "embed.weight", "shared_head.head.weight": "head.weight"}
"""What each of those layers repeats of the model in published files."""

_DENSE_IN_MOE = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.)")


def as_published(name: str) -> str:
    """A name as the publisher writes it: transformers 5 saves Kimi's dense layers under the experts' name."""
    return _DENSE_IN_MOE.sub(r".mlp.\1", name)


@dataclass(frozen=True)
class Place:
    """Where one of our tensors lies in published files."""

    names: tuple[str, ...]
    layout: TensorLayout


def place_of(name: str, model: Model) -> Place:
    """Where our tensor `name` lies; raises KeyError for a name that the model does not have."""
    family = family_of(model)
    prefix = "language_model." if family == "kimi_k3" else ""
    if name in WHOLE:
        layout: TensorLayout = RowVector() if name.endswith("query") else Same()
        return Place((prefix + WHOLE[name],), layout)
    found = re.fullmatch(r"(layers|prediction)\.(\d+)\.(.+)", name)
    if found is None:
        raise KeyError(name)
    index, inner = int(found[2]), found[3]
    if found[1] == "prediction":
        place = _in_prediction(inner, family, model)
        index += model.layers
    else:
        place = _in_layer(inner, index, family, model)
    return Place(tuple(f"{prefix}model.layers.{index}.{theirs}" for theirs in place.names), place.layout)


def copies(model: Model) -> dict[str, str]:
    """Published names that repeat one of our tensors, which lies under a name of its own as well."""
    prediction = model.multi_token_prediction
    layers = range(model.layers, model.layers + (prediction.depth if prediction else 0))
    return {f"model.layers.{i}.{theirs}": ours for i in layers for theirs, ours in PREDICTION_COPIES.items()}


def _in_prediction(name: str, family: FamilyName, model: Model) -> Place:
    """A layer like the model's last, and what joins and ends it."""
    if name.startswith("layer."):
        return _in_layer(name.removeprefix("layer."), model.layers - 1, family, model)
    joined = name.startswith("projection")
    return Place((_renamed(name, PREDICTION),), OtherHalfFirst() if joined else Same())


def _in_layer(name: str, index: int, family: FamilyName, model: Model) -> Place:
    block, _, inner = name.partition(".")
    if block == "attention":
        delta = model.attention_kinds()[index] == "delta"
        theirs = _renamed(inner, DELTA if delta else LATENT)
        layout = _delta_layout(inner, family, model) if delta else _latent_layout(inner, family, model)
        return Place((f"self_attn.{theirs}",), layout)
    if block == "feed_forward":
        return _in_feed_forward(inner, index, family, model)
    return Place((_renamed(name, LAYER),), RowVector() if name.endswith("query") else Same())


def _in_feed_forward(name: str, index: int, family: FamilyName, model: Model) -> Place:
    sparse = model.feed_forward_kinds()[index] == "experts"
    block = "block_sparse_moe" if sparse and family != "deepseek_v3" else "mlp"
    if name.startswith("experts."):
        assert model.feed_forward.experts is not None
        matrix = EXPERT[family][name.removeprefix("experts.")]
        experts = range(model.feed_forward.experts.routed)
        return Place(tuple(f"{block}.experts.{e}.{matrix}.weight" for e in experts), Apart())
    return Place((f"{block}.{_renamed(name, FEED_FORWARD)}",), Same())


def _renamed(name: str, table: dict[str, str]) -> str:
    """`name`, its longest known beginning replaced; names that both sides share are in no table."""
    known = [start for start in table if name == start or name.startswith(start + ".")]
    if not known:
        return name
    start = max(known, key=len)
    return table[start] + name[len(start) :]


def _delta_layout(name: str, family: FamilyName, model: Model) -> TensorLayout:
    if "conv" in name:
        return OneChannel()
    if name == "a_log":
        return Padded(delta_of(model).heads) if family == "kimi_k3" else Broadcast()
    return Same()


def _latent_layout(name: str, family: FamilyName, model: Model) -> TensorLayout:
    latent = model.attention.latent
    assert latent is not None
    if family != "deepseek_v3" or latent.rope_width == 0:
        return Same()
    if name in ("q_up.weight", "q_proj.weight"):
        return InterleavedRotary(latent.nope_width + latent.rope_width, latent.rope_width)
    if name == "kv_down.weight":
        return InterleavedRotary(latent.kv_rank + latent.rope_width, latent.rope_width)
    return Same()
