"""What several operators share: bias-free projections and their tensor-parallel collectives."""

from __future__ import annotations

from typing import Literal

import numpy as np

from shipway.compiler.operators.backward import Step
from shipway.compiler.operators.base import Elementwise, Gemm, Number, Parameter, Shard, Sharding, Transfer


def weight(
    name: str,
    rows: int,
    columns: int,
    sharding: Sharding = "replicated",
    *,
    optimizer: Literal["muon", "adamw"] = "muon",
    heads: int = 1,
    fp8: bool | None = None,
) -> Parameter:
    """Weight [rows, columns] of a projection from `columns` to `rows` features.

    Its products may run in fp8 unless it says otherwise, or is rows of vectors that AdamW takes (gates of
    whole heads), whose few outputs a rounded input would spoil for nothing.
    """
    may_fp8 = optimizer == "muon" if fp8 is None else fp8
    return Parameter(f"{name}.weight", (rows, columns), sharding, optimizer, heads, fp8=may_fp8)


def norm_weight(name: str, width: int) -> Parameter:
    """Weight of an RMSNorm."""
    return Parameter(f"{name}.weight", (width,))


def gemm(name: str, rows: Number, inner: Number, columns: Number) -> Gemm:
    """Product of `rows` tokens with a weight [columns, inner]."""
    return Gemm(name, rows, inner, columns)


def product_backward(
    name: str, rows: Number, inner: Number, columns: Number, shard: Shard, frees: Number
) -> Step:
    """Gradients of a projection [columns, inner] and of its input; `frees` beside that of its output."""
    element = rows * shard.element_bytes
    return Step(name, element * inner, element * columns + frees, weights=inner * columns)


def into_sequence_parallel(width: int, shard: Shard) -> tuple[Step, ...]:
    """Backward's way into a column-row pair: tensor parallel gathers the gradient of the output."""
    whole = np.where(np.asarray(shard.tensor) > 1, shard.tokens * width * shard.element_bytes, 0)
    return (Step("gathered output gradient", whole),)


def out_of_sequence_parallel(width: int, shard: Shard) -> tuple[Step, ...]:
    """The way out: the sum of the input's gradients is scattered; what was gathered is gone by then."""
    element = width * shard.element_bytes
    cut = np.asarray(shard.tensor) > 1
    local, whole = np.where(cut, shard.local_tokens * element, 0), np.where(cut, shard.tokens * element, 0)
    return (Step("scattered input gradient", local, 2 * whole),)


def gradient_sum(readers: int, tokens: Number, width: Number, shard: Shard) -> Elementwise:
    """What backward adds up, one by one, for an input [tokens, width] that `readers` operations read."""
    passes = 3 * (readers - 1)
    return Elementwise("sum of input gradients", 0, passes * tokens * width * shard.element_bytes, kernels=0)


def joint_sum(readers: int, tokens: Number, width: Number, shard: Shard) -> Elementwise:
    """The same where one kernel adds them (runtime/kernels/project.py)."""
    size = tokens * width * shard.element_bytes
    return Elementwise("sum of input gradients", 0, (readers + 1) * size)


def balanced_attention(shard: Shard, queries: Number, outputs: Number) -> tuple[Transfer, ...]:
    """Exchange of queries and outputs under context parallel, so that every rank has the same causal work.

    `queries` and `outputs` are elements of one token over the rank's heads (runtime's context_softmax).
    """
    size = shard.tokens * shard.element_bytes
    return (
        Transfer("queries to attend for", "cp", "all_to_all", size * queries, "forward"),
        Transfer("attention outputs", "cp", "all_to_all", size * outputs, "forward"),
        Transfer("gradients of attention outputs", "cp", "all_to_all", size * outputs, "backward"),
        Transfer("gradients of queries", "cp", "all_to_all", size * queries, "backward"),
    )


def sequence_parallel(name: str, width: int, shard: Shard, *, again: Number = 1) -> tuple[Transfer, ...]:
    """Collectives around a column-row pair of projections under tensor and sequence parallel.

    The input is gathered over the sequence before the column half and the output is
    reduce-scattered after the row half; backward mirrors both (arXiv 2205.05198, section 4.2.2).
    `again` says whether recomputation takes the output once more: 0 where a layer ends with it.
    """
    size = shard.tokens * width * shard.element_bytes
    return (
        Transfer(f"{name} input", "tp", "all_gather", size, "forward"),
        Transfer(f"{name} output", "tp", "reduce_scatter", size, "forward", again=again),
        Transfer(f"{name} output gradient", "tp", "all_gather", size, "backward"),
        Transfer(f"{name} input gradient", "tp", "reduce_scatter", size, "backward"),
    )
