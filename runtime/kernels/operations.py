"""The interface of the kernels that have more than one implementation, and their parameter-free modules.

Letters: B batch, T tokens, D model width, H query and key heads, HV value heads, K key width, V value
width, W taps, C channels, N documents. `cu_seqlens` [N+1]: see `documents`; None means that every row of
the batch is one document, and N = B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import plain_softmax_attention
from .convolution import plain_short_convolution
from .delta import plain_delta_rule, plain_delta_step
from .dispatch import is_plain
from .precision import compute_dtype
from .residual import plain_attention_residual


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
    chunk: int,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention's gated delta rule (arXiv 2510.26692, Eq. 6 to 9), chunk by chunk.

    `q`, `k` [B, T, H, K] before their L2 normalisation, `v` [B, T, HV, V] with HV a multiple of H (value
    head h reads key head h // (HV / H)), `g` [B, T, HV, K] decay logits without `dt_bias` [HV*K],
    `beta` [B, T, HV] logits, `a_log` [HV]. `lower_bound` < 0 bounds the log-decay of one token (Kimi K3,
    2.1.1), None takes the unbounded form. `chunk` tokens are one dense block, a matter of speed only.
    `initial_state` [N, HV, K, V]. Returns o [B, T, HV, V] in the dtype of `v`, scaled by K^{-1/2}, and
    the final states [N, HV, K, V] in fp32 if they are asked for.

    Raises ValueError when `lower_bound` is too low for a tile of 16 tokens.
    """
    options: dict[str, Any] = {
        "lower_bound": lower_bound,
        "chunk": chunk,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
    }
    if not is_plain("delta_rule", q.device.type):
        from . import cuda

        if cuda.serves_delta_rule(q.shape[-1], chunk, lower_bound):
            return cuda.delta_rule(q, k, v, g, beta, a_log, dt_bias, **options)
    return plain_delta_rule(q, k, v, g, beta, a_log, dt_bias, **options)


def delta_segment(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
    chunk: int,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A segment as an affine map of its initial state: S_out = transition @ S_in + written.

    Returns the transition [N, HV, K, K] and what the segment writes by itself [N, HV, K, V], fp32: what
    context-parallel ranks exchange (Kimi K3, arXiv 2607.24653, 5.1.2). Both come from one run of the rule
    on [v, 0] from the state [0, I], for the rule is linear in values and state together.
    """
    batch, tokens, value_heads, value_width = v.shape
    width = k.shape[-1]
    documents = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    values = torch.cat((v, v.new_zeros(batch, tokens, value_heads, width)), dim=-1)
    identity = torch.eye(width, dtype=compute_dtype(v.dtype), device=v.device)
    initial = F.pad(identity, (value_width, 0)).expand(documents, value_heads, -1, -1)
    _, final = delta_rule(
        k,
        k,
        values,
        g,
        beta,
        a_log,
        dt_bias,
        lower_bound=lower_bound,
        chunk=chunk,
        cu_seqlens=cu_seqlens,
        initial_state=initial.contiguous(),
        output_final_state=True,
    )
    assert final is not None
    written, transition = final.split((value_width, width), dim=-1)
    return transition, written


def delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    """`delta_rule` on one token of every sequence, for decoding; no gradient is promised.

    `q`, `k` [B, H, K], `v` [B, HV, V], `g` [B, HV, K], `beta` [B, HV], `state` [B, HV, K, V] fp32.
    Returns o [B, HV, V] in the dtype of `v` and the new state (a new tensor).
    """
    if not is_plain("delta_step", q.device.type):
        from . import cuda

        return cuda.delta_step(q, k, v, g, beta, a_log, dt_bias, state, lower_bound=lower_bound)
    return plain_delta_step(q, k, v, g, beta, a_log, dt_bias, state, lower_bound=lower_bound)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None = None,
    initial: Tensor | None = None,
    output_final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """SiLU of a causal depthwise convolution that never reaches over a document's start.

    `x` [B, T, C], `weight` [C, W], last tap on the current token; `initial` [N, W-1, C] the inputs before
    each document (zeros by default). Returns y [B, T, C] and, if asked for, the last W-1 inputs of every
    document [N, W-1, C], which continue it.
    """
    if not is_plain("short_convolution", x.device.type):
        from . import cuda

        return cuda.short_convolution(x, weight, cu_seqlens, initial, output_final)
    return plain_short_convolution(x, weight, cu_seqlens, initial, output_final)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = True, cu_seqlens: Tensor | None = None
) -> Tensor:
    """softmax(scale q k^T) v [B, T, H, V]: `q` [B, T, H, K], `k` [B, S, Hkv, K], `v` [B, S, Hkv, V].

    Query head h reads key head h // (H / Hkv). With T < S the queries are the last T of the S tokens.
    With `cu_seqlens` (T = S) tokens see their own document only.
    """
    device = q.device.type
    if cu_seqlens is not None and not is_plain("softmax_attention_documents", device):
        from . import cuda

        return cuda.documents_attention(q, k, v, scale=scale, causal=causal, cu_seqlens=cu_seqlens)
    if cu_seqlens is None and q.shape[1] == k.shape[1] and not is_plain("softmax_attention", device):
        from . import cuda

        return cuda.rows_attention(q, k, v, scale=scale, causal=causal)
    return plain_softmax_attention(q, k, v, scale=scale, causal=causal, cu_seqlens=cu_seqlens)


def attention_residual(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, list[Tensor]]:
    """Softmax over depth [B, T, D] (arXiv 2603.15031): sum_i softmax_i(query . RMSNorm(v_i)) v_i, in fp32.

    And the sources, to be read in place of those given from here on: their gradients are then summed where
    they are made.

    `sources` at least one tensor [B, T, D]; `query` [D], zero at the start of training (a plain average);
    `norm_weight` [D] and `eps` of the norm on the keys; the values are not normalised.
    """
    if not is_plain("attention_residual", sources[0].device.type):
        from . import residual_triton

        return residual_triton.attention_residual(sources, query, norm_weight, eps)
    return plain_attention_residual(sources, query, norm_weight, eps), list(sources)


class DeltaCore(nn.Module):
    """`delta_rule` as a module without parameters, which parallelism can replace from outside."""

    def __init__(self, *, lower_bound: float | None, chunk: int) -> None:
        super().__init__()
        self.lower_bound = lower_bound
        self.chunk = chunk

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        cu_seqlens: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `delta_rule`."""
        return delta_rule(
            q,
            k,
            v,
            g,
            beta,
            a_log,
            dt_bias,
            lower_bound=self.lower_bound,
            chunk=self.chunk,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )


class SoftmaxCore(nn.Module):
    """`softmax_attention` as a module without parameters, which parallelism can replace from outside."""

    def __init__(self, *, scale: float, causal: bool = True) -> None:
        super().__init__()
        self.scale = scale
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """See `softmax_attention`."""
        return softmax_attention(q, k, v, scale=self.scale, causal=self.causal, cu_seqlens=cu_seqlens)
