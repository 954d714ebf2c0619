"""Attention residual: a softmax over depth (arXiv 2603.15031, 3), in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .precision import widen


def plain_attention_residual(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """sum_i p_i v_i, p = softmax_i(query . RMSNorm(v_i) * norm_weight), per token, in fp32."""
    wide = [widen(source) for source in sources]
    probe = widen(query) * widen(norm_weight)
    logits = [(x @ probe) * torch.rsqrt(x.square().mean(-1) + eps) for x in wide]
    weights = torch.stack(logits, dim=-1).softmax(-1).unsqueeze(-1).unbind(-2)
    mixed = weights[0] * wide[0]
    for weight, x in zip(weights[1:], wide[1:], strict=True):
        mixed = torch.addcmul(mixed, weight, x)
    return mixed.to(sources[0].dtype)
