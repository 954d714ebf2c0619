"""The attention residual on a GPU, with the sources handed on.

l_s = (u . v_s) r_s with u = query * norm_weight and r_s = 1 / rms(v_s); p = softmax(l); h = sum_s p_s v_s.
With dh the gradient of h, c_s = dh . v_s and dl_s = p_s (c_s - sum_t p_t c_t):

    du = sum_s dl_s r_s v_s
    dv_s = p_s dh + dl_s (r_s u - l_s r_s^2 v_s / D), and what came to v_s from its later readers

A source is read again after every layer. Were it not handed on, autograd would add the gradients of its
readers one by one, each a pass over three hidden states; so it is one read in the kernel.

Letters: N tokens, S sources, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .wanted import inner, wanted

TOKENS = 16
"""That a program of the backward kernel adds du up over."""
WIDTH_OF_WARP = 512


def attention_residual(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, list[Tensor]]:
    """The mixture [B, T, D] and the `sources`, to be read from here on."""
    mixed, *rest = _Residual.apply(inner(query), inner(norm_weight), eps, *sources)
    return mixed, rest


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, norm_weight: Tensor, eps: float, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        flat = _flat(sources)
        tokens, width = flat[0].shape
        mixed = torch.empty_like(flat[0])
        logits, scales = flat[0].new_empty(2, tokens, len(sources), dtype=torch.float32)
        _residual_forward[(tokens,)](
            flat, query, norm_weight, mixed, logits, scales, width, eps, **_constants(flat)
        )
        ctx.save_for_backward(query, norm_weight, logits, scales, *sources)
        ctx.set_materialize_grads(False)
        return mixed.view_as(sources[0]), *sources

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *after: Tensor | None) -> tuple[Tensor | None, ...]:
        query, norm_weight, logits, scales, *sources = ctx.saved_tensors
        if grad is None:
            return None, None, None, *after
        flat, width = _flat(sources), query.shape[0]
        grads = tuple(torch.empty_like(source) for source in flat)
        handed = any(x is not None for x in after)
        later = _flat([_or_zero(x, v) for x, v in zip(after, sources, strict=True)]) if handed else grads
        tokens, programs = flat[0].shape[0], triton.cdiv(flat[0].shape[0], TOKENS)
        parts = torch.empty(programs, width, dtype=torch.float32, device=query.device)
        _residual_backward[(programs,)](
            flat,
            query,
            norm_weight,
            grad.reshape(-1, width).contiguous(),
            later,
            grads,
            parts,
            logits,
            scales,
            tokens,
            width,
            **_constants(flat),
            HANDED=handed,
            TOKENS=TOKENS,
            PADDED=triton.next_power_of_2(len(flat)),
        )
        grad_query = grad_weight = None
        if wanted(ctx, 0) or wanted(ctx, 1):
            total = parts.sum(0)
            grad_query = (total * norm_weight).to(query.dtype)
            grad_weight = (total * query).to(norm_weight.dtype)
        return grad_query, grad_weight, None, *(g.view_as(v) for g, v in zip(grads, sources, strict=True))


def _flat(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.reshape(-1, x.shape[-1]).contiguous() for x in tensors)


def _or_zero(gradient: Tensor | None, source: Tensor) -> Tensor:
    return torch.zeros_like(source) if gradient is None else gradient


def _constants(sources: Sequence[Tensor]) -> dict[str, Any]:
    width = triton.next_power_of_2(sources[0].shape[1])
    return {"SOURCES": len(sources), "WIDTH": width, "num_warps": min(16, max(4, width // WIDTH_OF_WARP))}


@triton.jit
def _row(pointer, place, inside):  # type: ignore[no-untyped-def]
    """A token's hidden state in fp32, zero where it is not `inside`."""
    return tl.load(pointer + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rows(pointers, place, inside, SOURCES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A token's rows of all sources, asked for before any is used."""
    rows = ()
    for s in tl.static_range(SOURCES):
        rows = rows + (tl.load(pointers[s] + place, mask=inside, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@triton.jit
def _residual_forward(  # type: ignore[no-untyped-def]
    sources,
    query,
    norm_weight,
    mixed,
    logits,
    scales,
    width,
    eps,
    SOURCES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    probe = _row(query, channel, channel < width) * _row(norm_weight, channel, channel < width)
    total = tl.zeros((WIDTH,), tl.float32)
    place, inside = token * width + channel, channel < width
    largest = -float("inf")
    weight = 0.0
    rows = _rows(sources, place, inside, SOURCES)
    for s in tl.static_range(SOURCES):
        value = rows[s].to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        logit = tl.sum(value * probe, 0) * scale
        tl.store(logits + token * SOURCES + s, logit)
        tl.store(scales + token * SOURCES + s, scale)
        new = tl.maximum(largest, logit)
        keep, share = tl.exp(largest - new), tl.exp(logit - new)
        total = total * keep + value * share
        weight = weight * keep + share
        largest = new
    tl.store(mixed + place, (total / weight).to(mixed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _residual_backward(  # type: ignore[no-untyped-def]
    sources,
    query,
    norm_weight,
    grad,
    later,
    grads,
    parts,
    logits,
    scales,
    tokens,
    width,
    SOURCES: tl.constexpr,
    WIDTH: tl.constexpr,
    HANDED: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    source = tl.arange(0, PADDED)
    probe = _row(query, channel, channel < width) * _row(norm_weight, channel, channel < width)
    total = tl.zeros((WIDTH,), tl.float32)
    for i in range(TOKENS):
        token = program * TOKENS + i
        inside = (channel < width) & (token < tokens)
        place = token * width + channel
        change = _row(grad, place, inside)
        rows = _rows(sources, place, inside, SOURCES)
        after = _rows(later, place, inside, SOURCES if HANDED else 0)
        dots = tl.zeros((PADDED,), tl.float32)
        for s in tl.static_range(SOURCES):
            dots = tl.where(source == s, tl.sum(change * rows[s].to(tl.float32), 0), dots)
        present = (source < SOURCES) & (token < tokens)
        logit = tl.load(logits + token * SOURCES + source, mask=present, other=-float("inf"))
        scale = tl.load(scales + token * SOURCES + source, mask=present, other=0.0)
        share = tl.exp(logit - tl.max(logit, 0))
        share = share / tl.sum(share, 0)
        slope = share * (dots - tl.sum(share * dots, 0))
        along_probe = tl.where(present, slope * scale, 0.0)
        along_value = tl.where(present, slope * logit * scale * scale, 0.0) / width
        for s in tl.static_range(SOURCES):
            value = rows[s].to(tl.float32)
            turn = tl.sum(tl.where(source == s, along_probe, 0.0), 0)
            result = tl.sum(tl.where(source == s, share, 0.0), 0) * change + turn * probe
            result -= tl.sum(tl.where(source == s, along_value, 0.0), 0) * value
            if HANDED:
                result += after[s].to(tl.float32)
            total += turn * value
            tl.store(grads[s] + place, result.to(grads[s].dtype.element_ty), mask=inside)
    tl.store(parts + program * width + channel, total, mask=channel < width)
