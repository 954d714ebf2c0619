"""Mixture of experts: choosing, ordering tokens by expert, and the grouped product.

Letters: T tokens, E experts, k experts per token, D width of what the experts read and write.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .balance import count
from .dispatch import chosen, is_plain
from .elementwise import fuse
from .precision import widen
from .split_product import gradient_of_input, gradient_of_weight, split_product
from .wanted import inner, wanted


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T, [T, E], multiplied and summed in the dtype of `weight`, which training keeps in fp32.

    `x` [T, D], `weight` [E, D]. Keeps `x` as it is for the backward pass: no copy in fp32 outlives forward.
    """
    return _RouterLogits.apply(x, inner(weight))


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return split_product(x, weight) if _splits(x, weight) else x.to(weight.dtype) @ weight.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        if _splits(x, weight):
            grad_x = gradient_of_input(grad, weight) if wanted(ctx, 0) else None
            return grad_x, gradient_of_weight(grad, x) if wanted(ctx, 1) else None
        grad_x = (grad @ weight).to(x.dtype) if wanted(ctx, 0) else None
        return grad_x, grad.mT @ x.to(weight.dtype) if wanted(ctx, 1) else None


def _splits(x: Tensor, weight: Tensor) -> bool:
    halves = x.dtype == torch.bfloat16 and weight.dtype == torch.float32
    return halves and not is_plain("router_logits", x.device.type)


class Routing(NamedTuple):
    """What the router decided for T tokens."""

    indices: Tensor
    """[T, k] int64, chosen experts, best biased score first."""
    weights: Tensor
    """[T, k] fp32, mixture weights from the unbiased scores; differentiable."""
    scores: Tensor
    """[T, E] fp32, unbiased scores; differentiable."""
    cutoff: Tensor
    """[T] fp32, the (k+1)-th largest biased score, which quantile balancing measures margins from."""


def route(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    scores: Literal["sigmoid", "softmax"] = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    active_groups: int = 1,
) -> Routing:
    """Choose k experts per token from `logits` [T, E] by score + `bias` [E]; weigh them by score alone.

    With groups, only experts of a token's best `active_groups` groups can be chosen; a group counts by
    the sum of its two best biased scores (DeepSeek-V3, arXiv 2412.19437) for sigmoid scores and by its
    best (DeepSeek-V2, arXiv 2405.04434) for softmax scores.
    """
    logits = widen(logits)
    value = logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)
    with torch.no_grad():
        biased = value if bias is None else value + bias
        if active_groups < groups:
            biased = _mask_groups(biased, groups, active_groups, best=2 if scores == "sigmoid" else 1)
        top = biased.topk(min(k + 1, biased.shape[1]), dim=1)
    indices = top.indices[:, :k]
    weights = value.gather(1, indices)
    if renormalize:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
    return Routing(indices, weights * scale, value, top.values[:, -1])


def _mask_groups(biased: Tensor, groups: int, active: int, best: int) -> Tensor:
    grouped = biased.unflatten(1, (groups, -1))  # [T, groups, E / groups]
    merit = grouped.topk(min(best, grouped.shape[2]), dim=2).values.sum(2)
    kept = torch.zeros_like(merit, dtype=torch.bool).scatter_(1, merit.topk(active, dim=1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)


class Order(NamedTuple):
    """Rows of a batch sorted by expert: T*k rows, stable, so that equal inputs give equal order."""

    token: Tensor
    """[T*k] int64, the token each row holds."""
    place: Tensor
    """[T*k] int64, the row where choice t*k + i went."""
    counts: Tensor
    """[E] int64, rows of each expert."""
    offsets: Tensor
    """[E] int32, cumulative counts: where each expert's rows end."""


def order_by_expert(indices: Tensor, experts: int) -> Order:
    """Sort the T*k choices of `indices` [T, k] by expert."""
    flat = indices.flatten()
    row = torch.argsort(flat, stable=True)
    place = torch.empty_like(row).scatter_(0, row, torch.arange(row.numel(), device=row.device))
    counts = count(flat, experts)
    return Order(row // indices.shape[1], place, counts, counts.cumsum(0).to(torch.int32))


def permute(x: Tensor, order: Order) -> Tensor:
    """Copy every token [T, D] to each of its experts' rows: [T*k, D] sorted by expert."""
    return _Permute.apply(x, order.token, order.place)


def unpermute(rows: Tensor, order: Order, weights: Tensor) -> Tensor:
    """Bring the experts' rows [T*k, D] back and sum them by `weights` [T, k], in fp32: [T, D].

    Rows past T*k are ignored. Keeps `rows` as they are for the backward pass.
    """
    return _Unpermute.apply(rows, weights, order.token, order.place)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, token, place)
        return _weighted_sum(rows, weights, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, token, place = ctx.saved_tensors
        by_row = torch.empty_like(weights).flatten().index_copy_(0, place, weights.flatten())
        grad_rows, dots = _weighted_sum_backward(grad, rows, by_row.unsqueeze(1), token)
        if rows.shape[0] > token.shape[0]:
            grad_rows = torch.cat((grad_rows, rows.new_zeros(rows.shape[0] - token.shape[0], rows.shape[1])))
        return grad_rows, dots.index_select(0, place).view_as(weights).to(weights.dtype), None, None


@fuse
def _weighted_sum(rows: Tensor, weights: Tensor, place: Tensor) -> Tensor:
    """sum_i weights[t, i] * rows[place[t k + i]], [T, D]."""
    choices = widen(rows.index_select(0, place)).view(*weights.shape, rows.shape[1])
    return (choices * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


@fuse
def _weighted_sum_backward(
    grad: Tensor, rows: Tensor, weight: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows [T*k, D], and of the weight [T*k] that each of them had."""
    wide = widen(grad.index_select(0, token))
    return (wide * weight).to(rows.dtype), (wide * rows[: token.shape[0]]).sum(-1)


class _Permute(torch.autograd.Function):
    """A gather whose backward is a gather too: no atomics, the same bits every time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.tokens = x.shape[0]
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        per_token = place.shape[0] // max(ctx.tokens, 1)  # under expert parallel a rank may have no rows
        return _sum_of_choices(grad, place.view(ctx.tokens, per_token)), None, None


@fuse
def _sum_of_choices(rows: Tensor, place: Tensor) -> Tensor:
    """sum_i rows[place[t, i]], [T, D], summed in fp32."""
    choices = widen(rows.index_select(0, place.flatten())).view(*place.shape, rows.shape[1])
    return choices.sum(1).to(rows.dtype)


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, *, whole: bool = False) -> Tensor:
    """x[rows of expert e] @ weight[e]^T for every expert: [rows, out].

    `x` [rows, in], sorted by expert; `weight` [E, out, in]; `offsets` [E] int32, where each expert's rows
    end. Rows past offsets[-1] come out zero, and get a zero gradient; with `whole` there are none, and no
    pass over the rows is spent on them. An expert without rows gets a gradient of zeros (never None), so that
    every rank's optimizer sees every expert.
    """
    return _GroupedMM.apply(x, inner(weight), offsets, whole)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, whole: bool) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.whole = whole
        return _rows_by_expert(x, weight.mT, offsets, whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _rows_by_expert(grad, weight, offsets, ctx.whole) if wanted(ctx, 0) else None
        grad_weight = _outer_by_expert(grad, x, offsets) if wanted(ctx, 1) else None
        return grad_x, grad_weight, None, None


def _rows_by_expert(x: Tensor, weight: Tensor, offsets: Tensor, whole: bool) -> Tensor:
    """x [rows, a] @ weight [E, a, b] by expert, tail rows zero."""
    if _fused(x, weight):
        out = torch._grouped_mm(x, weight, offs=offsets)
        if whole:
            return out
        rows = torch.arange(out.shape[0], device=out.device).unsqueeze(1)
        # The kernel leaves the tail as it found it. Not in place: selective recomputation keeps `out`.
        return out.masked_fill(rows >= offsets[-1], 0)
    segments = _segments(offsets)
    products = [x[start:end] @ weight[expert] for expert, start, end in segments]
    tail = x.shape[0] - (segments[-1][2] if segments else 0)
    return torch.cat([*products, x.new_zeros(tail, weight.shape[2])])


def _outer_by_expert(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """grad[rows of e]^T @ x[rows of e]: [E, out, in], zeros for an expert without rows."""
    if _fused(grad, x):
        return torch._grouped_mm(grad.mT, x, offs=offsets)
    out = x.new_zeros(offsets.shape[0], grad.shape[1], x.shape[1])
    for expert, start, end in _segments(offsets):
        torch.mm(grad[start:end].mT, x[start:end], out=out[expert])
    return out


def _segments(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of the experts that have rows."""
    ends = offsets.tolist()
    return [
        (e, start, end) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start
    ]


def _fused(x: Tensor, weight: Tensor) -> bool:
    """Whether the grouped kernel takes these: bf16 with rows that start at multiples of 16 bytes."""
    aligned = all(size % 8 == 0 for size in (x.shape[-1], *weight.shape[-2:]))
    return (
        chosen("grouped_mm", x.device.type) == "torch._grouped_mm" and x.dtype == torch.bfloat16 and aligned
    )
