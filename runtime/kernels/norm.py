"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32, in the dtype of `x`."""
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(
        x.dtype
    )
