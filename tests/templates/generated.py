"""Generated models to test: small ones that between them have every block, and the blueprints' own."""

from __future__ import annotations

import copy
import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch

from shipway.compiler.compose import compose
from shipway.compiler.emit.model import Header, render_model
from shipway.schemas.model import Model

HEADER = Header(name="test", shipway="0", plan_hash="sha256:0", command="shipway build test")

HYBRID: dict[str, Any] = {
    "vocabulary": 61,
    "width": 32,
    "layers": 5,
    "attention": {
        "mix": {"pattern": ["delta", "latent"], "tail": ["latent"]},
        "delta": {"heads": 2, "key_width": 16, "value_width": 16, "decay_rank": 8, "chunk": 32},
        "latent": {
            "heads": 2,
            "query_rank": 24,
            "kv_rank": 16,
            "nope_width": 12,
            "rope_width": 8,
            "value_width": 16,
        },
    },
    "feed_forward": {
        "mix": {"pattern": ["experts"], "head": ["dense"]},
        "dense_inner_width": 48,
        "experts": {"routed": 8, "active": 2, "inner_width": 24, "latent_width": 16, "shared": 2},
        "activation": {"kind": "situ"},
    },
    "residual": {"kind": "block", "block_layers": 2},
    "init_std": 0.1,
}
"""Every block of the reference design, as small as it goes."""

GROUPED: dict[str, Any] = {
    "mix": {"pattern": ["grouped"]},
    "grouped": {"heads": 4, "kv_heads": 2, "head_width": 8, "query_key_norm": True, "bias": True},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "older delta": {
        "attention.delta.decay": {"kind": "unbounded"},
        "attention.delta.output_gate": "low_rank",
        "attention.delta.output_gate_bias": True,
        "attention.delta.value_heads": 4,
        "attention.delta.value_width": 8,
        "attention.latent.query_rank": None,
        "residual": {"kind": "full"},
    },
    "rotary latent": {
        "attention.latent.position": {
            "kind": "rotary",
            "yarn": {"factor": 4.0, "original_context": 16},
        },
        "attention.latent.output_gate": "per_head",
        "attention.latent.norm_eps": 1e-6,
        "residual": {"kind": "plain"},
        "feed_forward.experts.groups": 4,
        "feed_forward.experts.active_groups": 2,
        "feed_forward.experts.balancing": {"kind": "bias"},
        "feed_forward.experts.latent_width": None,
        "feed_forward.experts.scale": 2.5,
        "feed_forward.activation": {"kind": "swiglu"},
        "multi_token_prediction": {"depth": 2},
    },
    "grouped": {
        "attention": GROUPED,
        "residual": {"kind": "plain"},
        "feed_forward.mix": {"pattern": ["experts"]},
        "feed_forward.experts.scores": "softmax",
        "feed_forward.experts.latent_width": None,
        "feed_forward.experts.shared_gate": True,
        "feed_forward.experts.shared_inner_width": 16,
        "feed_forward.experts.balancing": {"kind": "auxiliary", "weight": 0.01},
        "feed_forward.activation": {"kind": "swiglu"},
        "tied_embeddings": True,
    },
    "grouped gated": {
        "attention": {
            "mix": {"pattern": ["grouped"]},
            "grouped": {
                "heads": 4,
                "kv_heads": 1,
                "head_width": 8,
                "bias": True,
                "output_gate": "elementwise",
                "position": {"kind": "none"},
            },
        },
        "feed_forward.mix": {"pattern": ["dense"]},
        "feed_forward.experts": None,
        "residual": {"kind": "full"},
    },
    "three kinds": {
        "layers": 4,
        "attention.mix": ["delta", "grouped", "latent", "delta"],
        "attention.grouped": {"heads": 4, "kv_heads": 2, "head_width": 8, "output_gate": "per_head"},
        "attention.latent.rope_width": 0,
        "attention.latent.output_gate": "none",
        "feed_forward.mix": ["experts", "dense", "experts", "dense"],
        "feed_forward.experts.router_input": "latent",
        "feed_forward.experts.latent_norm": False,
        "feed_forward.experts.renormalize": False,
        "feed_forward.experts.shared": 0,
        "feed_forward.experts.balancing": {"kind": "none"},
        "multi_token_prediction": {"depth": 1},
    },
    "all delta": {
        "attention.mix": {"pattern": ["delta"]},
        "feed_forward.experts.balancing": {"kind": "quantile", "estimator": "exact"},
    },
    "vision": {
        "vision": {
            "layers": 2,
            "width": 16,
            "heads": 2,
            "head_width": 12,
            "inner_width": 24,
            "patch": 4,
            "position_grid": 5,
            "projector_width": 20,
        },
    },
}
"""Changes to HYBRID, by dotted path; together they take every branch of the templates."""

PUBLISHED = (
    "k3",
    "deepseek_v3",
    "kimi_k2",
    "kimi_linear_48b",
    "qwen3_235b",
    "mixtral_8x7b",
    "llama31_405b",
    "small_h200",
    "tiny",
)
"""Blueprints of ours."""


def variant(name: str, **changes: Any) -> Model:
    """The model of VARIANTS, with further changes by path (double underscores for dots)."""
    data = copy.deepcopy(HYBRID)
    for path, value in {**VARIANTS[name], **{p.replace("__", "."): v for p, v in changes.items()}}.items():
        *sections, key = path.split(".")
        section = data
        for part in sections:
            section = section[part]
        section[key] = copy.deepcopy(value)
    return Model.from_data(data)


@cache
def blueprint_model(name: str) -> Model:
    """The model section of one of our blueprints."""
    return Model.from_data(compose(name).data["model"])


def load(model: Model) -> ModuleType:
    """The module that `model.py` would be."""
    return load_text(render_model(model, header=HEADER))


@cache
def load_text(text: str) -> ModuleType:
    """A module from its text."""
    module = ModuleType(f"generated_{abs(hash(text))}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(text, module.__name__, "exec"), module.__dict__)
    return module


def build(model: Model, seed: int = 0) -> torch.nn.Module:
    """A model with its weights drawn, and none of them at the zero where gradients vanish."""
    instance = load(model).Model()
    instance.init_weights(torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in instance.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return instance


def tokens_of(model: Model, rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.vocabulary, (rows, length), generator=generator)


def next_labels(tokens: torch.Tensor) -> torch.Tensor:
    """Labels that ask for the next token, and nothing at the end of a row."""
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    return labels
