"""FLOPs that an implementation executes, as torch.utils.flop_counter counts them.

Model FLOPs (`base.flops`) say what the mathematics needs; these say what the kernels do: causal
attention computes its scores again in backward and the counter takes the whole square; the plain
delta rule works on padded chunks; the fused loss head forms its gradients in forward.
"""

from __future__ import annotations

from collections.abc import Iterable

from shipway.compiler.operators.base import (
    Attention,
    Cast,
    DeltaRule,
    Elementwise,
    Flops,
    Gemm,
    Implementation,
    Kernel,
    Number,
    backward_flops,
    flops,
    forward_flops,
)
from shipway.compiler.operators.delta_core import plain_chunk, plain_tile


def counted_flops(kernels: Iterable[Kernel], implementation: Implementation) -> Flops:
    """Matrix-product FLOPs that torch's counter sees, forward and backward without recomputation.

    The fused delta rule runs outside torch's sight; its model FLOPs stand for it.
    """
    counts = [_counted(kernel, implementation) for kernel in kernels]
    return Flops(sum(c.forward for c in counts), sum(c.backward for c in counts))


def _counted(kernel: Kernel, implementation: Implementation) -> Flops:
    match kernel:
        case Gemm(gradients_in_forward=True):
            return Flops(forward_flops(kernel) + backward_flops(kernel), 0)
        case Gemm() | Elementwise() | Cast():
            return flops((kernel,))
        case Attention():
            return _attention(kernel, implementation)
        case DeltaRule() if implementation == "plain":
            return _plain_delta_rule(kernel)
        case DeltaRule():
            return flops((kernel,))


def _attention(kernel: Attention, implementation: Implementation) -> Flops:
    """Two products forward; backward computes scores anew: three at the keys' width, two at the values'."""
    keys, values = kernel.key_width, kernel.value_width
    if implementation == "plain":
        values = max(keys, values)
    square = 2 * kernel.batch * kernel.heads * kernel.queries * kernel.keys
    return Flops(square * (keys + values), square * (3 * keys + 2 * values))


def _plain_delta_rule(kernel: DeltaRule) -> Flops:
    """Products of runtime/kernels/delta.py: within tiles, across tiles, the triangular solve, the scan.

    Exact for sequences of more than one chunk. Backward takes two products for each, but for the first
    state and the last, which nothing reads, and for the inverse, whose gradient needs it alone.
    """
    K, V, tile = kernel.key_width, kernel.value_width, plain_tile(kernel.bounded)
    tokens = kernel.tokens / kernel.sequences
    C = plain_chunk(kernel.chunk, tokens)
    runs = kernel.sequences * kernel.heads
    chunks: Number = runs * -(-tokens // C)
    within = 4 * C * tile * K
    across = 2 * C * tile * K * (C / tile - 1)
    state = 2 * C * K * V
    graph = within + across + 3 * state + 2 * C * C * V
    # Blocks of 2, 4, ..., C/2 rows are joined by two products each: 2 C s^2 in all for blocks of s rows.
    inverse = 2 * C * ((C / 2) ** 2 * 4 - 4) / 3
    solve = 2 * C * C * (K + V)
    forward = graph + inverse + solve
    return Flops(chunks * forward, chunks * (2 * graph + 2 * solve) - runs * 3 * state)
