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

    def __init__(self, message: str, way_out: str) -> None:
        super().__init__(message)
        self.way_out = way_out
        """What to set in the blueprint; empty where no field does it."""


@dataclass(frozen=True)
class Reason:
    """One thing that a family has not."""

    words: str
    settings: tuple[str, ...] = ()
    """Fields of the blueprint, each with the value that the family has; none where it takes another model."""


@dataclass(frozen=True)
class Misfit:
    """Why a family cannot hold a model."""

    family: FamilyName
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return f"{self.family}: {'; '.join(reason.words for reason in self.reasons)}"

    def way_out(self) -> str:
        """Help for the person whose model it is; empty where a reason is no matter of a field."""
        if not all(reason.settings for reason in self.reasons):
            return ""
        settings = "\n  ".join(setting for reason in self.reasons for setting in reason.settings)
        return f"For {self.family}, set in the blueprint, then plan, build and train again:\n  {settings}"


def family_of(model: Model) -> FamilyName:
    """The published family that holds `model`; raises Unpublishable with the reasons of each."""
    misfits = [Misfit(family, tuple(reasons(model))) for family, reasons in _RULES.items()]
    for misfit in misfits:
        if not misfit.reasons:
            return misfit.family
    closest = sorted(misfits, key=lambda misfit: len(misfit.reasons))
    message = "no published family can hold this model\n  " + "\n  ".join(map(str, closest))
    raise Unpublishable(message, next((way for misfit in closest if (way := misfit.way_out())), ""))


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


def _any(model: Model) -> Iterator[Reason]:
    """What no family has."""
    latent, experts = model.attention.latent, model.feed_forward.experts
    if latent is None or "latent" not in model.attention_kinds():
        yield Reason("it has no latent attention")
    elif (latent.norm_eps or model.norm_eps) != LATENT_NORM_EPS:
        words = f"latent norms have an epsilon of {latent.norm_eps or model.norm_eps}, not {LATENT_NORM_EPS}"
        yield Reason(words, ("model.attention.latent.norm_eps=1e-6",))
    if "grouped" in model.attention_kinds():
        yield Reason("it has grouped-query attention")
    if experts is None or "experts" not in model.feed_forward_kinds():
        yield Reason("it has no experts")
    elif experts.scores != "sigmoid" or not experts.renormalize or not _biased(experts):
        yield Reason("experts are not chosen by sigmoid scores with a balancing bias, renormalised")
    elif not _plainly_shared(experts):
        yield Reason("shared experts are missing, gated, or of another width than routed ones")
    dense = sum(kind == "dense" for kind in model.feed_forward_kinds())
    if "dense" in model.feed_forward_kinds()[dense:]:
        yield Reason("dense layers do not all come first")
    if model.tied_embeddings:
        yield Reason("embeddings are tied", ("model.tied_embeddings=false",))
    if model.vision is not None:
        yield Reason("vision towers have no counterpart here", ("model.vision=null",))


def _ordinary(model: Model) -> Iterator[Reason]:
    """What came only with Kimi K3."""
    experts, latent = model.feed_forward.experts, model.attention.latent
    if model.residual.kind != "plain":
        yield Reason("it has attention residuals", ("model.residual.kind=plain",))
    if model.feed_forward.activation.kind != "swiglu":
        yield Reason("its activation is not SwiGLU", ("model.feed_forward.activation.kind=swiglu",))
    if experts is not None and experts.latent_width is not None:
        yield Reason("experts work on a latent", ("model.feed_forward.experts.latent_width=null",))
    if latent is not None and latent.output_gate != "none":
        yield Reason("latent attention is gated", ("model.attention.latent.output_gate=none",))


def _not_deepseek_v3(model: Model) -> Iterator[Reason]:
    yield from _any(model)
    yield from _ordinary(model)
    latent = model.attention.latent
    if "delta" in model.attention_kinds():
        yield Reason("it has delta attention")
    if latent is not None and latent.position.kind != "rotary":
        yield Reason(
            "latent attention has no rotary position", ("model.attention.latent.position.kind=rotary",)
        )


def _not_kimi(model: Model) -> Iterator[Reason]:
    yield from _any(model)
    if model.multi_token_prediction is not None:
        yield Reason("multi-token prediction has no counterpart here", ("model.multi_token_prediction=null",))
    delta, latent = model.attention.delta, model.attention.latent
    if delta is None or "delta" not in model.attention_kinds():
        yield Reason("it has no delta attention")
    elif {delta.key_width, delta.value_width, delta.decay_rank} != {delta.key_width}:
        width = delta.key_width
        settings = (f"model.attention.delta.value_width={width}", f"model.attention.delta.decay_rank={width}")
        yield Reason("keys, values and decays of delta attention differ in width", settings)
    elif delta.value_heads not in (None, delta.heads):
        yield Reason(
            "delta attention has more value heads than key heads", ("model.attention.delta.value_heads=null",)
        )
    elif delta.output_gate_bias:
        yield Reason(
            "the gate of delta attention has a bias", ("model.attention.delta.output_gate_bias=false",)
        )
    if latent is not None and latent.position.kind != "none":
        yield Reason("latent attention has positions", ("model.attention.latent.position.kind=none",))


def _not_kimi_linear(model: Model) -> Iterator[Reason]:
    yield from _not_kimi(model)
    yield from _ordinary(model)
    delta = model.attention.delta
    if delta is not None and delta.decay.kind != "unbounded":
        yield Reason("the decay is bounded", ("model.attention.delta.decay.kind=unbounded",))
    if delta is not None and delta.output_gate != "low_rank":
        yield Reason(
            "the gate of delta attention is not of low rank", ("model.attention.delta.output_gate=low_rank",)
        )


def _not_k3(model: Model) -> Iterator[Reason]:
    yield from _not_kimi(model)
    delta, latent, experts = model.attention.delta, model.attention.latent, model.feed_forward.experts
    if model.residual.kind != "block":
        yield Reason("it has no block attention residuals", ("model.residual.kind=block",))
    if model.feed_forward.activation.kind != "situ":
        yield Reason("its activation is not SiTU-GLU", ("model.feed_forward.activation.kind=situ",))
    if delta is not None and (delta.decay.kind != "bounded" or delta.output_gate != "full"):
        yield Reason(
            "delta attention has no bounded decay with a full gate",
            ("model.attention.delta.decay.kind=bounded", "model.attention.delta.output_gate=full"),
        )
    if latent is not None and latent.output_gate != "elementwise":
        yield Reason(
            "latent attention has no elementwise gate", ("model.attention.latent.output_gate=elementwise",)
        )
    if experts is not None and (experts.latent_width is None or experts.router_input != "hidden"):
        yield Reason("experts do not work on a latent with a router on the hidden state")


_RULES: dict[FamilyName, Callable[[Model], Iterator[Reason]]] = {
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
