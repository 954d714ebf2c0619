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


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` times sigmoid(gate), `gate` of the shape of `x`, in fp32 and rounded once.

    Keeps `x` and `gate` as they are and the scale of every row for the backward pass.
    """
    return _GatedRMSNorm.apply(x, gate, weight, eps)


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


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = _normalize_gated(x.flatten(0, -2), gate.flatten(0, -2), weight, eps)
        ctx.save_for_backward(x, gate, weight, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight, scale = ctx.saved_tensors
        grad, flat, gate = (rows.flatten(0, -2) for rows in (grad, x, gate))
        grad_x, grad_gate, grad_weight = _normalize_gated_backward(grad, flat, gate, weight, scale)
        return grad_x.view(x.shape), grad_gate.view(x.shape), grad_weight, None


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


@fuse
def _normalize_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = widen(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight * widen(gate).sigmoid()).to(x.dtype), scale


@fuse
def _normalize_gated_backward(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, normal, opened = widen(grad), widen(x) * scale, widen(gate).sigmoid()
    grad_gate = grad * normal * weight * opened * (1 - opened)
    grad = grad * opened
    grad_weight = (grad * normal).sum(0).to(weight.dtype)
    grad = grad * weight
    grad_x = scale * (grad - normal * (grad * normal).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_gate.to(gate.dtype), grad_weight
