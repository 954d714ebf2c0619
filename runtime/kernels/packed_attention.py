"""Attention over packed documents through torch's variable-length FlashAttention (arXiv 2307.08691).

One custom operator, so that selective recomputation can keep its output: the kernel wants values as wide as
keys, and what is added for that is cut off again before anything is kept for backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_WIDTH = 256
DTYPES = (torch.bfloat16, torch.float16)


def serves(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these."""
    return q.dtype in DTYPES and v.shape[-1] <= q.shape[-1] <= LARGEST_WIDTH and q.shape[-1] % 8 == 0


@torch.library.custom_op("shipway::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [N, H, V], log-sum-exp and random state of q [N, H, K], k [N, Hkv, K], v [N, Hkv, V].

    `bounds` [n + 1] int32 are those of the documents. `longest` is no less than the longest of them: a
    bound costs nothing, reading the true one a wait.
    """
    wide = _widen(v, q.shape[-1])
    out, lse, state, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, wide, bounds, bounds, longest, longest, 0.0, causal, False, scale=scale
    )
    return out[..., : v.shape[-1]].contiguous(), lse, state


@packed_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads = q.shape[:2]
    lse = q.new_empty(heads, tokens, dtype=torch.float32)
    return q.new_empty(tokens, heads, v.shape[-1]), lse, q.new_empty(2, dtype=torch.uint64)


@torch.library.custom_op("shipway::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    width = q.shape[-1]
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        _widen(grad, width),
        q,
        k,
        _widen(v, width),
        _widen(out, width),
        lse,
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        causal,
        state,
        q.new_empty(0),
        scale=scale,
    )
    return dq, dk, dv[..., : v.shape[-1]].contiguous()


@packed_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, bounds, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)


def _backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
    grads = packed_attention_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None, None)


packed_attention.register_autograd(_backward, setup_context=_keep)


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
