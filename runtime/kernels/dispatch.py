"""Which implementation serves each operation, decided once per process and device type.

`SHIPWAY_KERNELS=plain` in the environment forces the plain PyTorch forms everywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from shipway.schemas.training import Compilation

OVERRIDE = "SHIPWAY_KERNELS"


@dataclass(frozen=True)
class Choice:
    """One row of the table of kernels."""

    operation: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class Fast:
    """A faster implementation on CUDA, and the distribution that it needs, if any."""

    operation: str
    implementation: str
    package: str | None = None
    minimum: tuple[int, ...] = ()


FAST = (
    Fast("delta_rule", "fla chunk_kda", "fla-core", (0, 6)),
    Fast("delta_step", "fla fused_recurrent_kda", "fla-core", (0, 6)),
    Fast("short_convolution", "Triton; with a state fla causal_conv1d", "fla-core", (0, 6)),
    Fast("attention_residual", "Triton"),
    Fast("softmax_attention", "SDPA cuDNN"),
    Fast("softmax_attention_documents", "FlashAttention, packed"),
    Fast("grouped_mm", "torch._grouped_mm"),
    Fast("router_logits", "bf16 products of three parts"),
    Fast("elementwise", "torch.compile"),
)
"""Operations that have a faster form on CUDA; what is not listed is plain everywhere."""

PLAIN = {
    "delta_rule": "chunkwise PyTorch",
    "delta_step": "PyTorch",
    "short_convolution": "shifted sums",
    "attention_residual": "PyTorch",
    "softmax_attention": "SDPA",
    "softmax_attention_documents": "SDPA over documents of like length",
    "grouped_mm": "a loop over experts",
    "router_logits": "a product in fp32",
    "elementwise": "PyTorch",
}
"""The plain form of each operation."""


BLOCKS = "model blocks"
UNCOMPILED = {
    "cpu": "compiling takes seconds a block, and no gain has been measured",
    "cuda": "elementwise work is compiled already: whole blocks gain 1.5 % on an H200 or lose as much",
}
"""Why `training.compile: auto` leaves blocks of the model as they are, device by device."""


FUSED = "rounding to fp8 takes some ten kernels uncompiled, and one or two compiled"
"""Why it compiles them where products run in fp8."""


def table(
    device_type: str | None = None, compilation: Compilation = "auto", *, fp8: bool = False
) -> list[Choice]:
    """What runs on `device_type` ("cuda" or "cpu"; by default CUDA where there is a GPU), and why.

    `compilation` is the blueprint's `training.compile`; `fp8` says whether it computes in fp8.
    """
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return [*_choices(device_type).values(), blocks(device_type, compilation, fp8=fp8)]


def blocks(device_type: str, compilation: Compilation, *, fp8: bool = False) -> Choice:
    """Whether the model's blocks (attentions, gated units, vision layers) are compiled."""
    if compilation == "auto" and fp8 and device_type == "cuda":
        return Choice(BLOCKS, "torch.compile", f"{FUSED}; training.compile: none leaves them uncompiled")
    if compilation == "auto":
        why = f"{UNCOMPILED.get(device_type, 'not measured')}; training.compile: blocks compiles them"
        return Choice(BLOCKS, "PyTorch", why)
    implementation = "torch.compile" if compilation == "blocks" else "PyTorch"
    return Choice(BLOCKS, implementation, f"training.compile: {compilation}")


def compiles_blocks(device_type: str, compilation: Compilation, *, fp8: bool = False) -> bool:
    """Whether `blocks` chooses torch.compile."""
    return blocks(device_type, compilation, fp8=fp8).implementation == "torch.compile"


def chosen(operation: str, device_type: str) -> str:
    """The implementation that serves `operation` on `device_type`."""
    return _choices(device_type)[operation].implementation


def is_plain(operation: str, device_type: str) -> bool:
    """Whether the plain form serves `operation` on `device_type`."""
    return chosen(operation, device_type) == PLAIN[operation]


@cache
def _choices(device_type: str) -> dict[str, Choice]:
    return {fast.operation: _choose(fast, device_type) for fast in FAST}


def _choose(fast: Fast, device_type: str) -> Choice:
    plain = PLAIN[fast.operation]
    if os.environ.get(OVERRIDE, "") == "plain":
        return Choice(fast.operation, plain, f"{OVERRIDE}=plain")
    if device_type != "cuda":
        return Choice(fast.operation, plain, f"no other form on {device_type}")
    if fast.package is None:
        return Choice(fast.operation, fast.implementation, f"torch {torch.__version__}")
    try:
        found = version(fast.package)
    except PackageNotFoundError:
        return Choice(fast.operation, plain, f"{fast.package} is not installed: pip install shipway[gpu]")
    if tuple(int(part) for part in found.split(".")[:2]) < fast.minimum:
        needed = ".".join(map(str, fast.minimum))
        return Choice(fast.operation, plain, f"{fast.package} {found} is older than {needed}")
    return Choice(fast.operation, fast.implementation, f"{fast.package} {found}")
