"""Sigmoid gate on an attention's output, from the layer's input (arXiv 2505.06708)."""

from __future__ import annotations

from typing import Literal

from shipway.compiler.operators.backward import Step
from shipway.compiler.operators.base import Elementwise, Kernel, Number, Parameter, Saved, Shard
from shipway.compiler.operators.linear import gemm, product_backward, weight
from shipway.compiler.operators.softmax_core import SoftmaxCore

OutputGate = Literal["none", "elementwise", "per_head"]


def gate_width(gate: OutputGate, heads: int, value_width: int) -> int:
    """Rows of the gate's projection."""
    match gate:
        case "none":
            return 0
        case "per_head":
            return heads
        case "elementwise":
            return heads * value_width


def gate_parameters(gate: OutputGate, rows: int, width: int) -> tuple[Parameter, ...]:
    """The projection; per-head rows are vectors rather than a matrix, so AdamW takes them."""
    if gate == "none":
        return ()
    if gate == "per_head":
        return (weight("gate_proj", rows, width, "column", optimizer="adamw"),)
    return (weight("gate_proj", rows, width, "column"),)


def gate_kernels(gate: OutputGate, width: int, core: SoftmaxCore, shard: Shard) -> tuple[Kernel, ...]:
    """Gate projection and the product with the core's output."""
    if gate == "none":
        return ()
    rows = gate_width(gate, core.heads, core.value_width)
    size = _output_bytes(core, shard)
    return (
        gemm("gate_proj", shard.tokens, width, rows / shard.tensor),
        Elementwise("output gate", 3 * size, 5 * size),
    )


def gate_saved(gate: OutputGate, core: SoftmaxCore, shard: Shard) -> tuple[Saved, ...]:
    """The gate's logits and the gated output; a padded output's cut copy where products read matrices."""
    size = _output_bytes(core, shard)
    if gate == "none":
        return (Saved("output, cut to width", size),) if core.padded(shard) else ()
    rows = gate_width(gate, core.heads, core.value_width) / shard.tensor
    return (Saved("gate logits", shard.tokens * rows * shard.element_bytes), Saved("gated output", size))


def output_backward(gate: OutputGate, width: int, core: SoftmaxCore, shard: Shard) -> tuple[Step, ...]:
    """Output projection and gate, down to the gradient of the core's output; the first gradient of the
    attention's input comes with a gate."""
    size, tokens = _output_bytes(core, shard), shard.tokens
    weights = core.heads * core.value_width / shard.tensor * width
    if gate == "none":
        return (Step("output_proj", size, size if core.padded(shard) else 0, weights),)
    rows = gate_width(gate, core.heads, core.value_width) / shard.tensor
    logits = tokens * rows * shard.element_bytes
    return (
        Step("output_proj", size, size, weights),  # frees what it read
        Step("gate", size + logits, size + logits),
        product_backward("gate_proj", tokens, width, rows, shard, 0),
    )


def _output_bytes(core: SoftmaxCore, shard: Shard) -> Number:
    return shard.tokens * core.heads * core.value_width / shard.tensor * shard.element_bytes
