"""What rotary position embedding keeps for backward (runtime/kernels/rotary.py)."""

from __future__ import annotations

from shipway.compiler.operators.base import Number, Saved


def rotary_saved(rows: Number, width: int) -> Saved:
    """Cosines and sines in fp32 of `rows` tokens, counted once per rotated tensor, for heads of `width`."""
    return Saved("rotary angles", rows * width * 4)
