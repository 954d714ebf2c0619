"""Collectives of tensor parallel with their gradients: tokens gathered before split matrices, sums after."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOKENS = 1
"""Dimension of the tokens in activations [B, T, D]."""


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Shards [B, T / tp, D] of all ranks -> [B, T, D]; gradients, partial on each rank, are summed back."""
    return _GatherTokens.apply(x, group)


def sum_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums [B, T, D] on each rank -> this rank's tokens [B, T / tp, D] of the whole sum."""
    return _SumTokens.apply(x, group)


def gather_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., C / tp] of all ranks -> [..., C]; each rank must go on to the same loss."""
    return _GatherColumns.apply(x, group)


def sum_alike(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, each of which goes on to the same loss; gradients stay each rank's own share."""
    return _Sum.apply(x, group, False)


def sum_apart(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, each of which goes on to its own part of the loss; gradients are summed too."""
    return _Sum.apply(x, group, True)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, TOKENS, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, TOKENS, ctx.group), None


class _SumTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, TOKENS, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, TOKENS, ctx.group), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, x.ndim - 1, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, is_apart: bool) -> Tensor:
        ctx.group, ctx.is_apart = group, is_apart
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_reduce(grad, ctx.group) if ctx.is_apart else grad, None, None


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, dimension: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    shards = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(shards, x.contiguous(), group=group)
    return shards.unflatten(0, (ranks, -1)).movedim(0, dimension).flatten(dimension, dimension + 1)


def _reduce_scatter(x: Tensor, dimension: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    shards = x.unflatten(dimension, (ranks, -1)).movedim(dimension, 0).contiguous()
    out = torch.empty_like(shards[0])
    dist.reduce_scatter_tensor(out, shards.flatten(0, 1), group=group)
    return out
