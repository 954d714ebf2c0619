"""What several operators share: bias-free projections and their tensor-parallel collectives."""

from __future__ import annotations

from typing import Literal

from shipway.compiler.operators.base import Gemm, Number, Parameter, Shard, Sharding, Transfer


def weight(
    name: str,
    rows: int,
    columns: int,
    sharding: Sharding = "replicated",
    *,
    optimizer: Literal["muon", "adamw"] = "muon",
    heads: int = 1,
) -> Parameter:
    """Weight [rows, columns] of a projection from `columns` to `rows` features."""
    return Parameter(f"{name}.weight", (rows, columns), sharding, optimizer, heads)


def norm_weight(name: str, width: int) -> Parameter:
    """Weight of an RMSNorm."""
    return Parameter(f"{name}.weight", (width,))


def gemm(name: str, rows: Number, inner: Number, columns: Number) -> Gemm:
    """Product of `rows` tokens with a weight [columns, inner]."""
    return Gemm(name, rows, inner, columns)


def sequence_parallel(name: str, width: int, shard: Shard) -> tuple[Transfer, ...]:
    """Collectives around a column-row pair of projections under tensor and sequence parallel.

    The input is gathered over the sequence before the column half and the output is
    reduce-scattered after the row half; backward mirrors both (arXiv 2205.05198, section 4.2.2).
    """
    size = shard.tokens * width * shard.element_bytes
    return (
        Transfer(f"{name} input", "tp", "all_gather", size, "forward"),
        Transfer(f"{name} output", "tp", "reduce_scatter", size, "forward"),
        Transfer(f"{name} output gradient", "tp", "all_gather", size, "backward"),
        Transfer(f"{name} input gradient", "tp", "reduce_scatter", size, "backward"),
    )
