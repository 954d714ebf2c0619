"""Peers of the same dimensions, made from the blueprint's own model section so that none is stated twice."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.contenders.own import RefusedError
from shipway.schemas.model import BoundedDecay, Model, RotaryPosition


@dataclass(frozen=True)
class Peer:
    """A peer's model class with its configuration."""

    model_class: Any
    config: Any
    settings: dict[str, object]
    """What was chosen of its kernels."""

    def make(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The model with its own initial weights."""
        with torch.device(device):
            model: nn.Module = self.model_class._from_config(self.config, dtype=dtype)
        return model.train()


def peer_of(kind: str, model: Model, device_kind: str) -> Peer:
    """The nearest peer of a blueprint's model; raises RefusedError where it cannot run."""
    if kind == "flash-linear-attention":
        return _flash_linear_attention(model, device_kind)
    if importlib.util.find_spec("transformers") is None:
        raise RefusedError("transformers is not installed")
    if model.attention.grouped is not None:
        return _llama(model)
    if model.attention.delta is not None:
        return _kimi_linear(model)
    return _deepseek(model)


def _flash_linear_attention(model: Model, device_kind: str) -> Peer:
    """Its KDA model with all its fused kernels: norms, SwiGLU, head with cross-entropy."""
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("fla.models") is None:
        raise RefusedError("flash-linear-attention (with fla-core, einops and transformers) is not installed")
    if device_kind == "cpu":
        raise RefusedError("flash-linear-attention's kernels are in Triton, which has no CPU backend")
    from fla.models import KDAConfig, KDAForCausalLM

    delta = model.attention.delta
    assert delta is not None
    bounded = isinstance(delta.decay, BoundedDecay)
    fused = {"fuse_norm": True, "fuse_swiglu": True, "fuse_cross_entropy": True}
    config = KDAConfig(
        hidden_size=model.width,
        num_hidden_layers=model.layers,
        num_heads=delta.heads,
        head_dim=delta.key_width,
        expand_v=delta.value_width / delta.key_width,
        conv_size=delta.convolution_width,
        safe_gate=bounded,
        lower_bound=delta.decay.minimum if isinstance(delta.decay, BoundedDecay) else None,
        intermediate_size=model.feed_forward.dense_inner_width,
        vocab_size=model.vocabulary,
        norm_eps=model.norm_eps,
        use_cache=False,
        **fused,
    )
    return Peer(KDAForCausalLM, config, {**fused, "safe_gate": bounded})


def _llama(model: Model) -> Peer:
    from transformers import LlamaConfig, LlamaForCausalLM

    grouped = model.attention.grouped
    assert grouped is not None
    config = LlamaConfig(
        **_common(model),
        num_attention_heads=grouped.heads,
        num_key_value_heads=grouped.kv_heads,
        head_dim=grouped.head_width,
        intermediate_size=model.feed_forward.dense_inner_width,
    )
    return _with_kernels(LlamaForCausalLM, config)


def _deepseek(model: Model) -> Peer:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent, experts = model.attention.latent, model.feed_forward.experts
    assert latent is not None
    assert experts is not None
    assert isinstance(latent.position, RotaryPosition)
    config = DeepseekV3Config(
        **_common(model),
        **_latent(model),
        **_experts(model),
        n_routed_experts=experts.routed,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=model.feed_forward_kinds().count("dense"),
        num_mtp_layers=0,
    )
    return _with_kernels(DeepseekV3ForCausalLM, config)


def _kimi_linear(model: Model) -> Peer:
    """Its delta kernel is fla-core's where that is installed, its own PyTorch loop elsewhere."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    delta, experts = model.attention.delta, model.feed_forward.experts
    assert delta is not None
    assert experts is not None
    names = {"delta": "linear_attention", "latent": "full_attention"}
    config = KimiLinearConfig(
        **_common(model),
        **_latent(model),
        **_experts(model),
        layer_types=[names[kind] for kind in model.attention_kinds()],
        mlp_layer_types=["sparse" if k == "experts" else "dense" for k in model.feed_forward_kinds()],
        linear_head_dim=delta.key_width,
        linear_num_heads=delta.heads,
        linear_conv_kernel_dim=delta.convolution_width,
        num_local_experts=experts.routed,
    )
    return _with_kernels(KimiLinearForCausalLM, config)


def _with_kernels(model_class: Any, config: Any) -> Peer:
    """The fastest of transformers' own kernels: nothing is fetched."""
    config._attn_implementation = "sdpa"
    settings: dict[str, object] = {"attention": "sdpa, cuDNN before flash"}
    if model_class._can_set_experts_implementation():
        config._experts_implementation = settings["experts"] = "grouped_mm"
    return Peer(model_class, config, settings)


def _common(model: Model) -> dict[str, Any]:
    return {
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "max_position_embeddings": 1 << 20,
        "use_cache": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _latent(model: Model) -> dict[str, Any]:
    latent = model.attention.latent
    assert latent is not None
    return {
        "num_attention_heads": latent.heads,
        "num_key_value_heads": latent.heads,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_width,
        "qk_rope_head_dim": latent.rope_width,
        "v_head_dim": latent.value_width,
    }


def _experts(model: Model) -> dict[str, Any]:
    experts = model.feed_forward.experts
    assert experts is not None
    return {
        "intermediate_size": model.feed_forward.dense_inner_width,
        "moe_intermediate_size": experts.inner_width,
        "num_experts_per_tok": experts.active,
        "n_shared_experts": experts.shared,
        "routed_scaling_factor": experts.scale,
        "norm_topk_prob": experts.renormalize,
    }


def count(peer: Peer) -> int:
    """Parameters, counted without making any."""
    return sum(parameter.numel() for parameter in peer.make("meta", torch.float32).parameters())


def compile_layers(model: nn.Module, compiled: Callable[[nn.Module], None] = nn.Module.compile) -> None:
    """torch.compile on every decoder layer: what is repeated is compiled once."""
    for layer in model.model.layers:
        compiled(layer)
