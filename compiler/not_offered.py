"""What people ask of a trainer and this version does not do: what to say, and what to do instead."""

from __future__ import annotations

from typing import Any

_KEPT = "is training.layout.offload: {}"
KEYS = {
    "cpu_offload": _KEPT.format("optimizer, activations or both"),
    "optimizer_offload": _KEPT.format("optimizer"),
    "offload_optimizer": _KEPT.format("optimizer"),
    "activation_offload": _KEPT.format("activations, with recompute: full"),
    "offload_activations": _KEPT.format("activations, with recompute: full"),
    "parameter_offload": (
        "does not exist here, as every micro-batch gathers the weights: to hold less take zero: 3, more"
        " data_parallel_shard, or training.layout.offload: optimizer, which keeps their state in host memory"
    ),
}
"""Keys that other tools have, and what stands in their place here."""
VALUES = {
    "fp8": "fp8 is a way of computing (training.precision.compute), in which weights, gradients and moments"
    " stay in bf16 or fp32; `plan --serving` tells what weights in fp8 would take",
    "fp16": "training computes in bf16, which needs no loss scaling, in fp32, or in fp8",
    "fp4": "training computes in bf16 or fp32; `plan --serving` tells what 4-bit experts would take",
}
"""Values of number formats, likewise."""


def instead_of_key(key: str) -> str:
    """What to do in place of a key that this version does not have; empty for an ordinary mistake."""
    found = KEYS.get(key.lower().replace("-", "_"), "")
    return f"What other tools call so {found}." if found else ""


def instead_of_value(value: Any) -> str:
    """The same for the value of a number format."""
    found = VALUES.get(value.lower(), "") if isinstance(value, str) else ""
    return f"This version does not: {found}." if found else ""
