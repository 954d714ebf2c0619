"""What is compared: cases (one blueprint each) and who trains them, the most telling first."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

BLUEPRINTS = Path(__file__).parents[1] / "blueprints"
Kind = Literal["shipway", "flash-linear-attention", "transformers", "delta layer", "delta kernel"]
States = Literal["master", "bf16"]
"""Format of weights and optimizer: bf16 copies of fp32 master weights with fp32 moments, or all in bf16."""


@dataclass(frozen=True)
class Contender:
    """One row of the results: who trains which blueprint, and how."""

    case: str
    """Blueprint, and the row's group."""
    kind: Kind
    states: States = "master"
    variant: str = ""
    """What makes it differ from the case's plain contender."""
    overrides: tuple[str, ...] = ()
    """Of the blueprint, beyond the case's."""
    compiled: bool = False
    """Whether every layer of a peer goes through torch.compile."""

    @property
    def name(self) -> str:
        """case/who/states[/variant]."""
        parts = [self.case, self.kind.replace(" ", "-"), self.states, self.variant]
        return "/".join(part for part in parts if part)


ADAMW = "training.optimizer={kind: adamw}"
BF16 = "training.precision={master: bf16, gradients: bf16, optimizer: bf16}"
UNBOUNDED = ("~model.attention.delta.decay.minimum", "model.attention.delta.decay.kind=unbounded")
STEPS = "training.stages.0.tokens=960Ki"
ONE_PASS = ("training.stages.0.micro_batch=4", "training.stages.0.layout.zero=2")
"""All of a step in one micro-batch, parameters gathered once: what the card's memory allows."""
LARGE_BATCH = ("training.stages.0.tokens=3840Ki", "training.stages.0.global_batch=128Ki")
"""Four micro-batches a step, as one of many devices would take: the update is paid once for all."""

CONTENDERS = (
    Contender("delta_dense_8k", "shipway"),
    Contender("delta_dense_8k", "flash-linear-attention", "bf16"),
    Contender("small_h200_8k", "shipway", overrides=(ADAMW, STEPS, *ONE_PASS)),
    Contender("dense_8k", "shipway"),
    Contender("dense_8k", "transformers", "bf16"),
    Contender("latent_experts_8k", "shipway"),
    Contender("latent_experts_8k", "transformers", "bf16"),
    Contender("delta_dense_8k", "flash-linear-attention", "master"),
    Contender("delta_dense_8k", "shipway", "bf16", overrides=(BF16,)),
    Contender("dense_8k", "transformers", "bf16", "compiled", compiled=True),
    Contender("hybrid_experts_8k", "shipway"),
    Contender("hybrid_experts_8k", "transformers", "bf16"),
    Contender("dense_8k", "transformers", "master"),
    Contender("latent_experts_8k", "transformers", "master"),
    Contender("dense_8k", "shipway", "bf16", overrides=(BF16,)),
    Contender("latent_experts_8k", "shipway", "bf16", overrides=(BF16,)),
    Contender("small_h200_8k", "shipway", variant="muon", overrides=(STEPS,)),
    Contender("delta_dense_8k", "shipway", variant="128Ki", overrides=LARGE_BATCH),
    Contender("small_h200_8k", "shipway", variant="128Ki", overrides=(ADAMW, *LARGE_BATCH, *ONE_PASS)),
)
DECAY = (
    Contender("small_h200_8k", "shipway", variant="unbounded", overrides=(ADAMW, STEPS, *UNBOUNDED)),
    Contender("delta_dense_8k", "shipway", variant="unbounded", overrides=UNBOUNDED),
    Contender("delta_dense_8k", "delta kernel", variant="decay"),
)
CONTEXTS = (Contender("delta_dense_8k", "delta layer", variant="contexts"),)

_TINY_STAGE = (
    "training.stages.0.context=256",
    "training.stages.0.tokens=32Ki",
    "training.stages.0.global_batch=1Ki",
    "training.stages.0.micro_batch=2",
)
_TINY_MODEL = ("model.vocabulary=272", "model.width=64", "model.feed_forward.dense_inner_width=96")
_TINY_DELTA = (
    "model.attention.delta.heads=2",
    "model.attention.delta.key_width=32",
    "model.attention.delta.value_width=32",
    "model.attention.delta.decay_rank=32",
)
_TINY_LATENT = (
    "model.attention.latent.heads=2",
    "model.attention.latent.query_rank=32",
    "model.attention.latent.kv_rank=32",
    "model.attention.latent.nope_width=32",
    "model.attention.latent.rope_width=16",
    "model.attention.latent.value_width=32",
)
_TINY_EXPERTS = ("model.feed_forward.experts.routed=8", "model.feed_forward.experts.inner_width=32")
_TINY_PARTS = {
    "delta_dense_8k": ("model.layers=2", *_TINY_DELTA),
    "small_h200_8k": (
        "model.layers=4",
        *_TINY_DELTA,
        *_TINY_LATENT,
        *_TINY_EXPERTS,
        "model.feed_forward.experts.latent_width=32",
    ),
    "dense_8k": (
        "model.layers=2",
        "model.attention.grouped={heads: 2, kv_heads: 2, head_width: 32}",
    ),
    "hybrid_experts_8k": ("model.layers=4", *_TINY_DELTA, *_TINY_LATENT, *_TINY_EXPERTS),
    "latent_experts_8k": ("model.layers=2", *_TINY_LATENT, *_TINY_EXPERTS),
}
_ON_CPU = ("cluster=cpu_2", "cluster.devices_per_node=1", "training.precision.compute=fp32")


def overrides(contender: Contender, tiny: bool, asked: tuple[str, ...]) -> tuple[str, ...]:
    """All overrides of a contender's blueprint; a tiny one fits a CPU, and trains there."""
    small: tuple[str, ...] = ()
    if tiny:
        small = (*_ON_CPU, *_TINY_MODEL, *_TINY_STAGE, *_TINY_PARTS[contender.case])
    return (*contender.overrides, *small, *asked)


def chosen(patterns: tuple[str, ...], decay: bool, contexts: bool) -> tuple[Contender, ...]:
    """Contenders whose name one of the patterns fits, in order; without patterns the first of each case."""
    extra = (*(DECAY if decay else ()), *(CONTEXTS if contexts else ()))
    if not patterns:
        return extra if extra else CONTENDERS
    known = (*CONTENDERS, *DECAY, *CONTEXTS)
    wanted = [c for c in known if any(fnmatch(c.name, pattern) for pattern in patterns)]
    return (*wanted, *(c for c in extra if c not in wanted))
