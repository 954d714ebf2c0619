"""Published families that a model may belong to: what they can hold, and what their config.json says.

DeepSeek-V3's and Kimi Linear's are checked against transformers, whose checkpoints these names are;
multi-token prediction, which transformers leaves out, follows DeepSeek-V3's published files. Kimi K3's names
(text part only) are from notes on its published tensors and config.json, and not checked against a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shipway.schemas.model import DeltaAttention, Experts, LatentAttention, Model

FamilyName = Literal["deepseek_v3", "kimi_linear", "kimi_k3"]
LATENT_NORM_EPS = 1e-6
"""Published code builds the latent norms with RMSNorm's default, whatever `rms_norm_eps` says."""


class Unpublishable(Exception):  # noqa: N818 - a verdict about a model, with all its reasons
    """No published family can hold this model; the message lists why not, family by family."""


@dataclass(frozen=True)
class Misfit:
    """Why a family cannot hold a model."""

    family: FamilyName
    reasons: tuple[str, ...]


def family_of(model: Model) -> FamilyName:
    """The published family that holds `model`; raises Unpublishable with the reasons of each."""
    misfits = [Misfit(family, tuple(reasons(model))) for family, reasons in _RULES.items()]
    for misfit in misfits:
        if not misfit.reasons:
            return misfit.family
    closest = sorted(misfits, key=lambda misfit: len(misfit.reasons))
    lines = [f"{misfit.family}: {'; '.join(misfit.reasons)}" for misfit in closest]
    raise Unpublishable("no published family can hold this model\n  " + "\n  ".join(lines))


def config_of(model: Model) -> dict[str, Any]:
    """`config.json` of the model in its family."""
    family = family_of(model)
    config = _common(model)
    if family == "deepseek_v3":
        return config | _deepseek_v3(model)
    config |= _kimi(model)
    return (
        config if family == "kimi_linear" else {"model_type": "kimi_k3", "text_config": config | _k3(model)}
    )


def _any(model: Model) -> Iterator[str]:
    """What no family has."""
    latent, experts = model.attention.latent, model.feed_forward.experts
    if latent is None or "latent" not in model.attention_kinds():
        yield "it has no latent attention"
    elif (latent.norm_eps or model.norm_eps) != LATENT_NORM_EPS:
        yield f"latent norms have an epsilon of {latent.norm_eps or model.norm_eps}, not {LATENT_NORM_EPS}"
    if "grouped" in model.attention_kinds():
        yield "it has grouped-query attention"
    if experts is None or "experts" not in model.feed_forward_kinds():
        yield "it has no experts"
    elif experts.scores != "sigmoid" or not experts.renormalize or not _biased(experts):
        yield "experts are not chosen by sigmoid scores with a balancing bias, renormalised"
    elif not _plainly_shared(experts):
        yield "shared experts are missing, gated, or of another width than routed ones"
    dense = sum(kind == "dense" for kind in model.feed_forward_kinds())
    if "dense" in model.feed_forward_kinds()[dense:]:
        yield "dense layers do not all come first"
    if model.tied_embeddings:
        yield "embeddings are tied"
    if model.vision is not None:
        yield "vision towers have no counterpart here"


def _ordinary(model: Model) -> Iterator[str]:
    """What came only with Kimi K3."""
    experts, latent = model.feed_forward.experts, model.attention.latent
    if model.residual.kind != "plain":
        yield "it has attention residuals"
    if model.feed_forward.activation.kind != "swiglu":
        yield "its activation is not SwiGLU"
    if experts is not None and experts.latent_width is not None:
        yield "experts work on a latent"
    if latent is not None and latent.output_gate != "none":
        yield "latent attention is gated"


def _not_deepseek_v3(model: Model) -> Iterator[str]:
    yield from _any(model)
    yield from _ordinary(model)
    latent = model.attention.latent
    if "delta" in model.attention_kinds():
        yield "it has delta attention"
    if latent is not None and latent.position.kind != "rotary":
        yield "latent attention has no rotary position"


def _not_kimi(model: Model) -> Iterator[str]:
    yield from _any(model)
    if model.multi_token_prediction is not None:
        yield "multi-token prediction has no counterpart here"
    delta, latent = model.attention.delta, model.attention.latent
    if delta is None or "delta" not in model.attention_kinds():
        yield "it has no delta attention"
    elif {delta.key_width, delta.value_width, delta.decay_rank} != {delta.key_width}:
        yield "keys, values and decays of delta attention differ in width"
    elif delta.value_heads not in (None, delta.heads):
        yield "delta attention has more value heads than key heads"
    elif delta.output_gate_bias:
        yield "the gate of delta attention has a bias"
    if latent is not None and latent.position.kind != "none":
        yield "latent attention has positions"


def _not_kimi_linear(model: Model) -> Iterator[str]:
    yield from _not_kimi(model)
    yield from _ordinary(model)
    delta = model.attention.delta
    if delta is not None and delta.decay.kind != "unbounded":
        yield "the decay is bounded"
    if delta is not None and delta.output_gate != "low_rank":
        yield "the gate of delta attention is not of low rank"


def _not_k3(model: Model) -> Iterator[str]:
    yield from _not_kimi(model)
    delta, latent, experts = model.attention.delta, model.attention.latent, model.feed_forward.experts
    if model.residual.kind != "block":
        yield "it has no block attention residuals"
    if model.feed_forward.activation.kind != "situ":
        yield "its activation is not SiTU-GLU"
    if delta is not None and (delta.decay.kind != "bounded" or delta.output_gate != "full"):
        yield "delta attention has no bounded decay with a full gate"
    if latent is not None and latent.output_gate != "elementwise":
        yield "latent attention has no elementwise gate"
    if experts is not None and (experts.latent_width is None or experts.router_input != "hidden"):
        yield "experts do not work on a latent with a router on the hidden state"


_RULES: dict[FamilyName, Callable[[Model], Iterator[str]]] = {
    "deepseek_v3": _not_deepseek_v3,
    "kimi_linear": _not_kimi_linear,
    "kimi_k3": _not_k3,
}


def _biased(experts: Experts) -> bool:
    return experts.balancing.kind in ("quantile", "bias")


def _plainly_shared(experts: Experts) -> bool:
    width = experts.shared_inner_width or experts.inner_width
    return experts.shared > 0 and not experts.shared_gate and width == experts.inner_width


def _parts(model: Model) -> tuple[LatentAttention, Experts]:
    latent, experts = model.attention.latent, model.feed_forward.experts
    assert latent is not None
    assert experts is not None
    return latent, experts


def _common(model: Model) -> dict[str, Any]:
    latent, experts = _parts(model)
    return {
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.feed_forward.dense_inner_width or experts.inner_width,
        "moe_intermediate_size": experts.inner_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": latent.heads,
        "num_key_value_heads": latent.heads,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_width,
        "qk_rope_head_dim": latent.rope_width,
        "v_head_dim": latent.value_width,
        "first_k_dense_replace": sum(kind == "dense" for kind in model.feed_forward_kinds()),
        "moe_layer_freq": 1,
        "routed_scaling_factor": experts.scale,
        "topk_method": "noaux_tc",
        "topk_group": experts.active_groups,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": False,
        "attention_bias": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),  # the tokenizer's business
    }


def _deepseek_v3(model: Model) -> dict[str, Any]:
    latent, experts = _parts(model)
    position, prediction = latent.position, model.multi_token_prediction
    assert position.kind == "rotary"
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_routed_experts": experts.routed,
        "n_shared_experts": experts.shared,
        "num_experts_per_tok": experts.active,
        "n_group": experts.groups,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "rope_theta": position.theta,
        "rope_interleave": True,
        "num_nextn_predict_layers": prediction.depth if prediction else 0,
    }
    if position.yarn is not None:
        yarn = position.yarn
        config["max_position_embeddings"] = int(yarn.factor * yarn.original_context)
        config["rope_scaling"] = {
            "type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.attention_scale,
            "mscale_all_dim": yarn.attention_scale,
        }
    return config


def _kimi(model: Model) -> dict[str, Any]:
    _, experts = _parts(model)
    delta = model.attention.delta
    assert delta is not None
    numbered = list(enumerate(model.attention_kinds(), 1))
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_experts": experts.routed,
        "num_experts_per_token": experts.active,
        "num_shared_experts": experts.shared,
        "num_expert_group": experts.groups,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [number for number, kind in numbered if kind == "latent"],
            "kda_layers": [number for number, kind in numbered if kind == "delta"],
            "num_heads": delta.heads,
            "head_dim": delta.key_width,
            "short_conv_kernel_size": delta.convolution_width,
        },
    }


def _k3(model: Model) -> dict[str, Any]:
    _, experts = _parts(model)
    delta, activation, residual = model.attention.delta, model.feed_forward.activation, model.residual
    assert delta is not None
    assert delta.decay.kind == "bounded"
    assert activation.kind == "situ"
    assert residual.kind == "block"
    linear = _kimi(model)["linear_attn_config"]
    return {
        "linear_attn_config": linear | {"use_full_rank_gate": True, "gate_lower_bound": delta.decay.minimum},
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": experts.latent_width,
        "latent_moe_use_norm": experts.latent_norm,
        "hidden_act": "situ",
        "activation_situ_beta": activation.beta,
        "activation_situ_linear_beta": activation.linear_beta,
        "attn_res_block_size": residual.block_layers,
    }


def delta_of(model: Model) -> DeltaAttention:
    """Dimensions of a Kimi model's delta attention."""
    assert model.attention.delta is not None
    return model.attention.delta
