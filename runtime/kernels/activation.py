"""Gated units: SwiGLU (arXiv 2002.05202) and SiTU-GLU (Kimi K3, arXiv 2607.24653, Eq. 12); sigmoid gates.

All compute in fp32 and keep only their two inputs, in their own dtype, for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .elementwise import fuse
from .precision import widen


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise."""
    return _GatedUnit.apply(gate, up, None, None)


def situ_glu(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta); bounded by beta * linear_beta.

    `linear_beta` None leaves the linear half uncapped.
    """
    return _GatedUnit.apply(gate, up, beta, linear_beta)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) (arXiv 2505.06708): `x` [..., heads, width], `gate` like it or [..., 1]."""
    return _SigmoidGate.apply(x, gate)


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return _opened(x, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _opened_backward(grad, *ctx.saved_tensors)


@fuse
def _opened(x: Tensor, gate: Tensor) -> Tensor:
    return (widen(x) * widen(gate).sigmoid()).to(x.dtype)


@fuse
def _opened_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    opened, slope = widen(gate).sigmoid(), widen(grad) * widen(x)
    if gate.shape != x.shape:
        slope = slope.sum(-1, keepdim=True)
    return (widen(grad) * opened).to(x.dtype), (slope * opened * (1 - opened)).to(gate.dtype)


class _GatedUnit(torch.autograd.Function):
    """(soft cap of gate) * sigmoid(gate) * (soft cap of up), a cap of None being the identity."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, cap: float | None, up_cap: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.caps = cap, up_cap
        return _gated(gate, up, cap, up_cap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_gated_backward(grad, *ctx.saved_tensors, *ctx.caps), None, None


@fuse
def _gated(gate: Tensor, up: Tensor, cap: float | None, up_cap: float | None) -> Tensor:
    wide = widen(gate)
    return (_soft_cap(wide, cap) * wide.sigmoid() * _soft_cap(widen(up), up_cap)).to(gate.dtype)


@fuse
def _gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, cap: float | None, up_cap: float | None
) -> tuple[Tensor, Tensor]:
    wide, grad = widen(gate), widen(grad)
    opened, capped, linear = wide.sigmoid(), _soft_cap(wide, cap), _soft_cap(widen(up), up_cap)
    # d(capped * sigmoid) = capped' sigmoid + capped sigmoid (1 - sigmoid)
    slope = opened * (_soft_cap_slope(capped, cap) + capped * (1 - opened))
    grad_up = grad * capped * opened * _soft_cap_slope(linear, up_cap)
    return (grad * linear * slope).to(gate.dtype), grad_up.to(up.dtype)


def _soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _soft_cap_slope(capped: Tensor, cap: float | None) -> Tensor | float:
    return 1.0 if cap is None else 1 - (capped / cap).square()
