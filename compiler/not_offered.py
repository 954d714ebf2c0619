"""What people ask of a trainer and this version does not do: what to say, and what to do instead."""

from __future__ import annotations

from typing import Any

_STATES = (
    "weights and optimizer state stay on the devices: to hold less of them there take zero: 3, more"
    " data_parallel_shard, training.precision.optimizer: bf16, or Muon, which keeps one moment"
)
_ACTIVATIONS = (
    "activations are kept on the device or made again, never moved to the host: take recompute: full,"
    " more context_parallel or tensor_parallel, or a smaller micro_batch"
)
KEYS = {
    "offload": f"{_STATES}; and {_ACTIVATIONS}",
    "cpu_offload": f"{_STATES}; and {_ACTIVATIONS}",
    "optimizer_offload": _STATES,
    "parameter_offload": _STATES,
    "activation_offload": _ACTIVATIONS,
}
"""Keys of a blueprint, by what would do in their place."""
VALUES = {
    "fp8": "training computes in bf16 or fp32; `plan --serving` tells what weights in fp8 would take",
    "fp16": "training computes in bf16, which needs no loss scaling, or fp32",
    "fp4": "training computes in bf16 or fp32; `plan --serving` tells what 4-bit experts would take",
}
"""Values of number formats, likewise."""


def instead_of_key(key: str) -> str:
    """What to do in place of a key that this version does not have; empty for an ordinary mistake."""
    return _said(KEYS.get(key.lower().replace("-", "_"), ""))


def instead_of_value(value: Any) -> str:
    """The same for the value of a number format."""
    return _said(VALUES.get(value.lower(), "")) if isinstance(value, str) else ""


def _said(text: str) -> str:
    return f"This version does not: {text}." if text else ""
