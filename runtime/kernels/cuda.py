"""The faster forms on CUDA: fla-core's Triton kernels, cuDNN, FlashAttention and FlexAttention.

Imported lazily, through `operations`, when `dispatch` has chosen one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from . import packed_attention, tuning
from .documents import derived, document_of_token

tuning.use_shipped()  # before anything imports fla, which reads its environment once

DELTA_CHUNKS = (32, 64)
DELTA_LARGEST_WIDTH = 256
DELTA_LOWEST_BOUND = -5.0


def serves_delta_rule(width: int, chunk: int, lower_bound: float | None) -> bool:
    """Whether fla's chunk kernel takes these."""
    bounded = lower_bound is None or lower_bound >= DELTA_LOWEST_BOUND
    return chunk in DELTA_CHUNKS and width <= DELTA_LARGEST_WIDTH and bounded


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
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """fla's chunk kernel, gate, beta and normalisation inside; documents need one flat row."""
    from fla.ops.kda import chunk_kda

    batch, tokens = q.shape[:2]
    inputs: tuple[Tensor, ...] = (q, k, v, g, beta)
    if cu_seqlens is not None:
        inputs = tuple(x.reshape(1, batch * tokens, *x.shape[2:]) for x in inputs)
        cu_seqlens = _wide(cu_seqlens)
    out, final = chunk_kda(
        *inputs,
        A_log=a_log.float(),
        dt_bias=dt_bias.float(),
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=lower_bound is not None,
        lower_bound=lower_bound,
        chunk_size=chunk,
        cu_seqlens=cu_seqlens,
    )
    return out.reshape(v.shape), final


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
    """fla's recurrent kernel on one token of every sequence."""
    from fla.ops.kda import fused_recurrent_kda

    out, final = fused_recurrent_kda(
        *(x.unsqueeze(1) for x in (q, k, v, g, beta)),
        A_log=a_log.float(),
        dt_bias=dt_bias.float(),
        initial_state=state.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=lower_bound,
    )
    return out.squeeze(1), final


def short_convolution(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, initial: Tensor | None, output_final: bool
) -> tuple[Tensor, Tensor | None]:
    """Our own kernel; where a state goes in or out fla's, whose cache holds W inputs per channel, ours W-1
    per token."""
    if initial is None and not output_final:
        from . import convolution_triton

        if weight.shape[1] <= convolution_triton.MOST_TAPS:
            return convolution_triton.short_convolution(x, weight, cu_seqlens), None
    from fla.modules.causal_conv1d import causal_conv1d

    batch, tokens, channels = x.shape
    if cu_seqlens is not None:
        x, cu_seqlens = x.reshape(1, batch * tokens, channels), _wide(cu_seqlens)
    if initial is not None:
        initial = F.pad(initial.transpose(1, 2), (1, 0)).contiguous()  # [N, C, W]
    y, final = causal_conv1d(
        x,
        weight,
        activation="silu",
        initial_state=initial,
        output_final_state=output_final,
        cu_seqlens=cu_seqlens,
    )
    tail = None if final is None else final[..., 1:].transpose(1, 2)
    return y.reshape(batch, tokens, channels), tail


def _wide(cu_seqlens: Tensor) -> Tensor:
    """One int64 copy per batch: fla keeps what it derives from boundaries by the tensor's identity, and
    a new copy in every layer would cost a wait for the device each time."""
    wide: Tensor = derived(cu_seqlens, "wide", lambda: cu_seqlens.to(torch.int64))
    return wide


def rows_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """SDPA, cuDNN first: it alone takes 192-wide keys with 128-wide values at full speed."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel([*backends, SDPBackend.MATH], set_priority=True):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def documents_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, cu_seqlens: Tensor
) -> Tensor:
    """FlashAttention over the flattened batch; FlexAttention for what it does not take."""
    batch, tokens = q.shape[:2]
    if packed_attention.serves(q, v):
        q, k, v = (x.reshape(batch * tokens, *x.shape[2:]) for x in (q, k, v))
        bounds = cu_seqlens.to(torch.int32)
        return packed_attention.packed_attention(q, k, v, bounds, tokens, scale, causal)[0].unflatten(
            0, (batch, tokens)
        )
    q, k, v = (x.reshape(1, batch * tokens, *x.shape[2:]).transpose(1, 2) for x in (q, k, v))
    mask = _document_mask(cu_seqlens, batch * tokens, causal)
    out = compiled(flex_attention)(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).reshape(batch, tokens, *out.shape[1:2], v.shape[-1])


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled, once for all callers."""
    return torch.compile(function)


def _document_mask(cu_seqlens: Tensor, tokens: int, causal: bool) -> BlockMask:
    """One mask per batch serves every layer, forward, backward and recomputation."""

    def make() -> BlockMask:
        document = document_of_token(cu_seqlens, tokens)

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same = document[query] == document[key]
            return same & (query >= key) if causal else same

        # compiled, it never holds the mask of every pair of tokens, only that of blocks
        return compiled(create_block_mask)(visible, None, None, tokens, tokens, device=cu_seqlens.device)

    mask: BlockMask = derived(cu_seqlens, ("mask", causal), make)
    return mask
