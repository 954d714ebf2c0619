"""The short convolution on a GPU: one pass over its input each way.

y = silu(z), z_n = sum_s w_s x_{n-s} over the s that stay inside the document of token n. A program walks down
the tokens of some channels with the last three inputs in registers, and backward, where z is made again,
with the gradients of the last three inputs too, so that everything is read once. Only x is kept.

Letters: N tokens of all rows, C channels, W taps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .documents import derived, positions_from

MOST_TAPS = 4
TOKENS = 64
"""That a program walks down, a multiple of 4."""
CHANNELS = 256
"""Of a program."""
WARPS = 2


def short_convolution(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """SiLU of the convolution of `x` [B, T, C] with `weight` [C, W], documents apart."""
    positions = None if cu_seqlens is None else _positions(cu_seqlens, x.shape[0] * x.shape[1])
    return _ShortConvolution.apply(x, weight, positions)


def _positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Position [N] int32 of every token in its document."""
    positions: Tensor = derived(
        cu_seqlens, "positions", lambda: positions_from(cu_seqlens, 1, tokens).flatten().to(torch.int32)
    )
    return positions


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, positions: Tensor | None) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, positions)
        y = torch.empty_like(x)
        tokens, channels, grid = _extent(x)
        _short_convolution_forward[grid](
            x, weight, positions, y, tokens, x.shape[1], channels, **_constants(weight, positions)
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, positions = ctx.saved_tensors
        tokens, channels, grid = _extent(x)
        grad_x = torch.empty_like(x)
        parts = torch.empty(grid[0], weight.shape[1], channels, dtype=torch.float32, device=x.device)
        _short_convolution_backward[grid](
            x,
            weight,
            positions,
            grad.contiguous(),
            grad_x,
            parts,
            tokens,
            x.shape[1],
            channels,
            **_constants(weight, positions),
        )
        return grad_x, parts.sum(0).mT.to(weight.dtype), None


def _extent(x: Tensor) -> tuple[int, int, tuple[int, int]]:
    """Tokens, channels, and the tiles of either."""
    tokens, channels = x.shape[0] * x.shape[1], x.shape[2]
    return tokens, channels, (triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS))


def _constants(weight: Tensor, positions: Tensor | None) -> dict[str, Any]:
    return {
        "TAPS": weight.shape[1],
        "PACKED": positions is not None,
        "TOKENS": TOKENS,
        "CHANNELS": CHANNELS,
        "num_warps": WARPS,
    }


@triton.jit
def _position(positions, token, tokens, row_tokens, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a token in its document."""
    if PACKED:
        return tl.load(positions + token, mask=token < tokens, other=0)
    return (token % row_tokens).to(tl.int32)


@triton.jit
def _row(x, token, tokens, channel, channels):  # type: ignore[no-untyped-def]
    """A token's channels; zero before the first token and beyond the last."""
    inside = (channel < channels) & (token >= 0) & (token < tokens)
    return tl.load(x + token * channels + channel, mask=inside, other=0.0)


@triton.jit
def _tap(weight, index, channel, channels, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of the input that lies `index` tokens back: zero where there is no such tap."""
    if index >= TAPS:
        return tl.zeros((channel.shape[0],), tl.float32)
    return tl.load(weight + channel * TAPS + (TAPS - 1 - index), mask=channel < channels, other=0.0).to(
        tl.float32
    )


@triton.jit
def _four(x, first, tokens, channel, channels):  # type: ignore[no-untyped-def]
    """Four tokens' channels, asked for before any is used."""
    return (
        _row(x, first, tokens, channel, channels),
        _row(x, first + 1, tokens, channel, channels),
        _row(x, first + 2, tokens, channel, channels),
        _row(x, first + 3, tokens, channel, channels),
    )


@triton.jit
def _taps(weight, channel, channels, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    return (
        _tap(weight, 0, channel, channels, TAPS),
        _tap(weight, 1, channel, channels, TAPS),
        _tap(weight, 2, channel, channels, TAPS),
        _tap(weight, 3, channel, channels, TAPS),
    )


@triton.jit(do_not_specialize=["tokens"])
def _short_convolution_forward(  # type: ignore[no-untyped-def]
    x,
    weight,
    positions,
    y,
    tokens,
    row_tokens,
    channels,
    TAPS: tl.constexpr,
    PACKED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TOKENS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    w0, w1, w2, w3 = _taps(weight, channel, channels, TAPS)
    x1 = _row(x, start - 1, tokens, channel, channels).to(tl.float32)
    x2 = _row(x, start - 2, tokens, channel, channels).to(tl.float32)
    x3 = _row(x, start - 3, tokens, channel, channels).to(tl.float32)
    for step in range(0, TOKENS, 4):
        rows = _four(x, start + step, tokens, channel, channels)
        for i in tl.static_range(4):
            token = start + step + i
            now = rows[i].to(tl.float32)
            position = _position(positions, token, tokens, row_tokens, PACKED)
            x1 = tl.where(position >= 1, x1, 0.0)
            x2 = tl.where(position >= 2, x2, 0.0)
            x3 = tl.where(position >= 3, x3, 0.0)
            z = w0 * now + w1 * x1 + w2 * x2 + w3 * x3
            inside = (channel < channels) & (token < tokens)
            place = token * channels + channel
            tl.store(y + place, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=inside)
            x3 = x2
            x2 = x1
            x1 = now


@triton.jit(do_not_specialize=["tokens"])
def _short_convolution_backward(  # type: ignore[no-untyped-def]
    x,
    weight,
    positions,
    grad_y,
    grad_x,
    parts,
    tokens,
    row_tokens,
    channels,
    TAPS: tl.constexpr,
    PACKED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TOKENS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    w0, w1, w2, w3 = _taps(weight, channel, channels, TAPS)
    x1 = _row(x, start - 1, tokens, channel, channels).to(tl.float32)
    x2 = _row(x, start - 2, tokens, channel, channels).to(tl.float32)
    x3 = _row(x, start - 3, tokens, channel, channels).to(tl.float32)
    zero = tl.zeros((CHANNELS,), tl.float32)
    g1, g2, g3 = zero, zero, zero  # of the last three inputs, as far as they are known
    s0, s1, s2, s3 = zero, zero, zero, zero  # of the taps
    for step in range(0, TOKENS + 4, 4):
        rows = _four(x, start + step, tokens, channel, channels)
        grads = _four(grad_y, start + step, tokens, channel, channels)
        for i in tl.static_range(4):
            token = start + step + i
            now = rows[i].to(tl.float32)
            position = _position(positions, token, tokens, row_tokens, PACKED)
            x1 = tl.where(position >= 1, x1, 0.0)
            x2 = tl.where(position >= 2, x2, 0.0)
            x3 = tl.where(position >= 3, x3, 0.0)
            z = w0 * now + w1 * x1 + w2 * x2 + w3 * x3
            opened = tl.sigmoid(z)
            change = grads[i].to(tl.float32) * opened * (1 + z * (1 - opened))
            g3 += tl.where(position >= 3, w3 * change, 0.0)
            known = token - 3
            inside = (channel < channels) & (known >= start) & (known < start + TOKENS) & (known < tokens)
            tl.store(grad_x + known * channels + channel, g3.to(grad_x.dtype.element_ty), mask=inside)
            g3 = g2 + tl.where(position >= 2, w2 * change, 0.0)
            g2 = g1 + tl.where(position >= 1, w1 * change, 0.0)
            g1 = w0 * change
            own = tl.where(step < TOKENS, change, 0.0)
            s0 += own * now
            s1 += own * x1
            s2 += own * x2
            s3 += own * x3
            x3 = x2
            x2 = x1
            x1 = now
    part = parts + tl.program_id(0).to(tl.int64) * TAPS * channels + channel
    sums = (s0, s1, s2, s3)
    for back in tl.static_range(TAPS):
        tl.store(part + (TAPS - 1 - back) * channels, sums[back], mask=channel < channels)
