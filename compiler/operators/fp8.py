"""Which products run in fp8, and what rounding their operands costs: torchao's rowwise recipe.

A float8 linear takes three products, as any linear does: output = x W^T, gradient of x = g W, gradient of
W = g^T x. Every operand is scaled along the dimension that its product sums over, and rounded anew for each
product: six times a step. Backward's two products sum with cuBLAS's kernel, which knows no scale per row,
so that their outputs are scaled after it (torchao 0.18, float8_linear.py and float8_ops.py). Kept for
backward is what a linear in bf16 keeps: input and weight, before rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shipway.compiler.operators.base import (
    Cast,
    Gemm,
    Kernel,
    Limit,
    Number,
    Operator,
    Parameter,
    Shard,
)
from shipway.schemas.layout import Recompute

GRANULE = 16
"""Every dimension of a product in fp8 is a multiple of this (cublasLtMatmul, data types FP8)."""
BF16, FP8, FP32 = 2, 1, 4

FUSED_ALONG, FUSED_ACROSS = BF16 + FP8, BF16 + BF16 + FP8
"""Bytes an element of a compiled cast: along memory one kernel finds a row's largest magnitude and rounds it
from cache; across it one kernel reads for the magnitudes, another reads again and writes."""
PLAIN_CAST = (BF16 + BF16) + BF16 + (BF16 + FP32) + (FP32 + FP32) + (FP32 + FP32) + (FP32 + FP8)
"""The same uncompiled, either way: magnitudes, their largest, to fp32, scaled, clamped, rounded."""
PLAIN_TRANSPOSE = FP8 + FP8
"""Uncompiled, operands that lie the other way are copied."""
FUSED_SCALING = BF16 + BF16
"""Bytes an element of an output that is scaled afterwards."""
PLAIN_SCALING = FP32 + (BF16 + FP32 + BF16)
"""The same uncompiled: the scales' outer product is written, then multiplied in."""
FUSED_KERNELS, PLAIN_KERNELS = 2, 16
"""Launches of one cast: uncompiled, scales of a few bytes take most of them."""


def runs_in_fp8(parameter: Parameter, smallest: int) -> bool:
    """Whether the products with a weight run in fp8."""
    return parameter.fp8 and all(n >= smallest and n % GRANULE == 0 for n in parameter.shape)


def fp8_products(operator: Operator, smallest: int) -> frozenset[str]:
    """Names of an operator's products that run in fp8."""
    return frozenset(p.name.split(".")[-2] for p in operator.parameters() if runs_in_fp8(p, smallest))


def fp8_limits(parameters: tuple[Parameter, ...], smallest: int) -> Iterator[Limit]:
    """What tensor parallel must divide, so that what is left of each weight is in whole granules."""
    for p in parameters:
        cut = {"column": 0, "row": 1}.get(p.sharding)
        if cut is not None and runs_in_fp8(p, smallest):
            what = (
                f"groups of {GRANULE} channels of {p.name.removesuffix('.weight')}, which multiplies in fp8"
            )
            yield Limit("tp", what, p.shape[cut] // GRANULE)


def kernels_of(operator: Operator, shard: Shard) -> tuple[Kernel, ...]:
    """Forward work of an operator, products in fp8 marked as such and their casts behind them."""
    return _in_fp8(operator, operator.kernels(shard), shard)


def recomputed(operator: Operator, shard: Shard, recompute: Recompute) -> tuple[Kernel, ...]:
    """Kernels that backward runs again; where products are kept, their operands are rounded all the same."""
    again = operator.recomputed(shard, recompute)
    if shard.fp8_smallest is None or recompute == "none":
        return again
    if recompute == "full":
        return _in_fp8(operator, again, shard)
    return (*again, *(k for k in kernels_of(operator, shard) if isinstance(k, Cast)))


def _in_fp8(operator: Operator, kernels: tuple[Kernel, ...], shard: Shard) -> tuple[Kernel, ...]:
    if shard.fp8_smallest is None:
        return kernels
    products = fp8_products(operator, shard.fp8_smallest)
    found: list[Kernel] = []
    for kernel in kernels:
        if isinstance(kernel, Gemm) and kernel.name in products:
            found += [replace(kernel, fp8=True), cast(kernel, fused=shard.casts_fused)]
        else:
            found.append(kernel)
    return tuple(found)


def cast(product: Gemm, *, fused: bool) -> Cast:
    """Rounding of all operands of a projection's three products, and the scaling of backward's outputs."""
    x, w = product.rows * product.inner, product.inner * product.columns
    g = product.rows * product.columns
    name = f"{product.name} in fp8"
    if fused:
        backward = FUSED_ALONG * g + FUSED_ACROSS * (g + w + x) + FUSED_SCALING * (x + w)
        return Cast(name, FUSED_ALONG * (x + w), backward, 2 * FUSED_KERNELS)
    backward = PLAIN_CAST * (2 * g + w + x) + PLAIN_SCALING * (x + w) + PLAIN_TRANSPOSE * (x + w + g)
    return Cast(name, PLAIN_CAST * (x + w), backward, 2 * PLAIN_KERNELS)


def scratch_bytes(operator: Operator, shard: Shard) -> Number:
    """Largest temporaries of one projection's backward: operands rounded for both products, and uncompiled
    two copies in fp32 of the one that is being rounded."""
    if shard.fp8_smallest is None:
        return 0
    products = fp8_products(operator, shard.fp8_smallest)
    largest: Number = 0
    for kernel in operator.kernels(shard):
        if isinstance(kernel, Gemm) and kernel.name in products:
            x, w = kernel.rows * kernel.inner, kernel.inner * kernel.columns
            g = kernel.rows * kernel.columns
            rounding = 0 if shard.casts_fused else 2 * FP32 * np.maximum(np.maximum(x, w), g)
            largest = np.maximum(largest, FP8 * (2 * g + w + x) + rounding)
    return largest
