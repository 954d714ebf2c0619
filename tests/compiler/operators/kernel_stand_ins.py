"""Functions that keep and make the same tensors as the CUDA kernels they stand for, in the same order.

Written after the allocations of the Python that calls them, fla-core 0.6.0's or ours (the files are named at
each), and of scaled_dot_product_attention's cuDNN form. No value means anything: they run on fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FP32 = torch.float32


def serves_delta_rule(width: int, chunk: int, lower_bound: float | None) -> bool:
    """It serves all that are drawn."""
    return True


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    chunk: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """`chunk_kda` with gate, beta and normalisation inside (fla/ops/kda/chunk.py)."""
    return _Delta.apply(q, k, v, g, beta, a_log.float(), dt_bias.float(), chunk), None


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, a_log: Any, dt_bias: Any, C: int) -> Any:
        q, q_rstd = _l2_normalised(q)
        k, k_rstd = _l2_normalised(k)
        wide_beta = torch.empty_like(beta, dtype=FP32)
        cumulative = torch.empty_like(g, dtype=FP32)
        within = [beta.new_empty(*beta.shape, C) for _ in range(2)]
        diagonal = beta.new_empty(*beta.shape, 16, dtype=FP32)
        w, u, kg = torch.empty_like(g), torch.empty_like(v), torch.empty_like(g)
        del diagonal
        states, values = _chunk_states(g, v, C), torch.empty_like(u)
        o = torch.zeros_like(v)
        del w, u, kg, states, values, cumulative
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, g, beta, wide_beta, a_log, dt_bias, *within)
        ctx.chunk = C
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, _, k, _, v, g, beta_raw, beta, a_log, dt_bias, _, a_kk = ctx.saved_tensors
        dq, dk, dv, db, dg, da, dbias = _delta_backward(q, k, v, g, beta, a_kk, a_log, dt_bias, do, ctx.chunk)
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        db = torch.empty_like(beta_raw)
        return dq, dk, dv, dg, db, da, dbias, None


def _delta_backward(
    q: Any, k: Any, v: Any, g_org: Any, beta: Any, a_kk: Any, a_log: Any, dt_bias: Any, do: Any, C: int
) -> Any:
    """fla/ops/kda/chunk_bwd.py, chunk_kda_bwd."""
    g = torch.empty_like(g_org, dtype=FP32)
    held = [torch.empty_like(like) for like in (g_org, v, g_org, g_org)]  # w, u, qg, kg
    held += [_chunk_states(g_org, v, C), torch.empty_like(v)]  # h, v_new
    held.append(torch.empty_like(a_kk, dtype=FP32))  # dAqk
    dv = torch.empty_like(do)
    held.append(_chunk_states(g_org, v, C))  # dh
    dv = torch.empty_like(dv)
    dq, dk = torch.empty_like(g), torch.empty_like(g)
    dv2, dg = torch.empty_like(v), torch.empty_like(g)
    db = torch.empty_like(beta)
    held.append(torch.empty_like(a_kk, dtype=FP32))  # dAkk
    dv = dv2
    dq, dk, db, dg = _intra(dq, dk, db, dg)
    if q.shape[2] < v.shape[2]:
        share = v.shape[2] // q.shape[2]
        dq = dq.unflatten(2, (-1, share)).sum(3)
        dk = dk.unflatten(2, (-1, share)).sum(3)
    dg = torch.empty_like(dg)
    gradient = torch.empty_like(g_org)
    parts = g_org.shape[1] * g_org.shape[0] // 32
    da, dbias = a_log.new_empty(parts, *a_log.shape), dt_bias.new_empty(parts, *dt_bias.shape)
    return dq, dk, dv, db, gradient, da.sum(0), dbias.sum(0)


def _intra(dq: Tensor, dk: Tensor, db: Tensor, dg: Tensor) -> Any:
    """fla/ops/kda/chunk_intra.py, chunk_kda_bwd_intra."""
    dq2, dk2 = torch.empty_like(dq), torch.empty_like(dk)
    db2 = db.new_empty(-(-dq.shape[-1] // 32), *db.shape)
    dg2 = torch.empty_like(dg)
    return dq2, dk2, db2.sum(0).add_(db), dg2


def _l2_normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(x.shape[:-1], dtype=FP32)


def _chunk_states(g: Tensor, v: Tensor, C: int) -> Tensor:
    batch, tokens, heads, width = g.shape
    return g.new_empty(batch, -(-tokens // C), heads, width, v.shape[-1])


def short_convolution(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, None]:
    """runtime/kernels/convolution_triton.py."""
    return _Convolution.apply(x, weight), None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        dw = weight.new_empty(x.shape[0] * -(-x.shape[1] // 64), *weight.shape, dtype=FP32)
        return dx, dw.sum(0).to(weight.dtype)


def attention_residual(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, list[Tensor]]:
    """runtime/kernels/residual_triton.py."""
    mixed, *handed_on = _Residual.apply(query, norm_weight, *sources)
    return mixed, handed_on


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, weight: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        mixed = torch.empty_like(sources[0])
        logits, scales = mixed.new_empty(2, *mixed.shape[:-1], len(sources), dtype=FP32)
        ctx.save_for_backward(query, weight, logits, scales, *sources)
        ctx.set_materialize_grads(False)
        return mixed, *sources

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *after: Tensor | None) -> Any:
        query, weight, _, _, *sources = ctx.saved_tensors
        gradients = [torch.empty_like(source) for source in sources]
        parts = weight.new_empty(-(-grad[..., 0].numel() // 16), len(weight), dtype=FP32)
        total = parts.sum(0)
        return total.to(query.dtype), total.to(weight.dtype), *gradients


def rows_attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """cuDNN's attention: output and log-sum-exp; backward makes three gradients."""
    return _Attention.apply(q, k, v)


@torch.library.custom_op("shipway_tests::attention", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("it runs on fake tensors alone")


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*q.shape[:-1], dtype=FP32)


attention_forward = torch.ops.shipway_tests.attention.default
"""What selective recomputation keeps, as it does SDPA's forms."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, statistics = _attend(q, k, v)
        ctx.save_for_backward(q, k, v, o, statistics)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The compiled rotation, whose backward needs the angles alone (runtime/kernels/rotary.py)."""
    return _Rotation.apply(x, cos, sin)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        _cos, _sin = ctx.saved_tensors
        return torch.empty_like(dy, memory_format=torch.contiguous_format), None, None
