"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .elementwise import fuse
from .precision import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32, in the dtype of `x`.

    Keeps `x` as it is and the fp32 reciprocal root mean square of every row for the backward pass.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = _normalize(x.flatten(0, -2), weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = _normalize_backward(grad.flatten(0, -2), x.flatten(0, -2), weight, scale)
        return grad_x.view(x.shape), grad_weight, None


@fuse
def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [rows, width] to its normalised form and the scale [rows, 1] of every row."""
    wide = widen(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype), scale


@fuse
def _normalize_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    grad, normal = widen(grad), widen(x) * scale
    grad_weight = (grad * normal).sum(0).to(weight.dtype)
    grad = grad * weight
    return (scale * (grad - normal * (grad * normal).mean(-1, keepdim=True))).to(x.dtype), grad_weight
