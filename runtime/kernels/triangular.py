"""Solving (I + A) X = B for many small strictly lower triangular A at once.

By inverting diagonal blocks, doubling their size each time: batched products only, where a library's
triangular solve goes matrix by matrix; as stable as block substitution (no powers of A are formed).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def solve_unit_lower(a: Tensor, b: Tensor) -> Tensor:
    """(I + tril(a, -1))^{-1} b: `a` [G, C, C], C a power of two, `b` [G, C, N]; only the strict lower
    triangle of `a` is read, and only it gets a gradient."""
    return _SolveUnitLower.apply(a, b)


class _SolveUnitLower(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        inverse = unit_lower_inverse(a)
        x = inverse @ b
        ctx.save_for_backward(inverse, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        inverse, x = ctx.saved_tensors
        grad_b = inverse.mT @ grad
        return (grad_b @ x.mT).tril_(-1).neg_(), grad_b


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + tril(a, -1))^{-1} of `a` [G, C, C], C a power of two.

    [[P, 0], [Q, R]]^{-1} = [[P^{-1}, 0], [-R^{-1} Q P^{-1}, R^{-1}]] for blocks of 1, 2, 4, ... rows.
    """
    count, length = a.shape[:2]
    inverse, size = a.new_ones(count, length, 1, 1), 1
    while size < length:
        pairs = length // (2 * size)
        grid = a.reshape(count, pairs, 2, size, pairs, 2, size).diagonal(dim1=1, dim2=4)
        corner = grid[:, 1, :, 0].movedim(-1, 1)  # [G, pairs, size, size], below each pair's diagonal
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        if size > 1:
            corner = second @ corner @ first
        joined = a.new_zeros(count, pairs, 2, size, 2, size)
        joined[:, :, 0, :, 0] = first
        joined[:, :, 1, :, 1] = second
        joined[:, :, 1, :, 0] = -corner
        inverse, size = joined.view(count, pairs, 2 * size, 2 * size), 2 * size
    return inverse[:, 0]
