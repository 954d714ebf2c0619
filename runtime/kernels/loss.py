"""Linear cross-entropy that never holds all logits (the idea of arXiv 2411.09009 and 2410.10989)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .precision import compute_dtype


def chunk_rows(tokens: int, width: int, vocabulary: int) -> int:
    """Rows of logits made at a time: a power of two, for logits about as large as the hidden states."""
    target = max(tokens * width // vocabulary, 16)
    return min(1 << (target - 1).bit_length(), max(tokens, 1))


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100, chunk: int | None = None
) -> Tensor:
    """Sum of the token losses in fp32 (float64 for float64 inputs), a scalar.

    `hidden` [N, D], `weight` [vocabulary, D], `labels` [N] int64; rows with `ignore_index` add nothing.
    Logits exist for `chunk` rows at a time (default `chunk_rows`). Where gradients are wanted they are
    formed in the same pass, three products in all, and kept: [N, D] in the dtype of `hidden`,
    [vocabulary, D] summed in fp32.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden [N, D], weight [V, D], labels [N]: {hidden.shape}, {weight.shape}, {labels.shape}"
        )
    rows = chunk or chunk_rows(hidden.shape[0], hidden.shape[1], weight.shape[0])
    return _LinearCrossEntropy.apply(hidden, weight, labels, ignore_index, rows, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, rows: int, grads: bool
    ) -> Tensor:
        wide = compute_dtype(hidden.dtype)
        weight_here = weight.to(hidden.dtype)
        want_hidden, want_weight = (grads and need for need in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = (hidden[part] @ weight_here.mT).to(wide)
            valid = labels[part] != ignore_index
            target = labels[part].where(valid, 0).unsqueeze(1)
            normalizer = logits.logsumexp(1, keepdim=True)
            loss += ((normalizer - logits.gather(1, target)).squeeze(1) * valid).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            slope = logits.sub_(normalizer).exp_()
            slope.scatter_add_(1, target, slope.new_full((), -1.0).expand_as(target))
            slope = slope.mul_(valid.unsqueeze(1)).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight_here, out=grad_hidden[part])
            if grad_weight is not None:
                _accumulate(grad_weight, slope, hidden[part])
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight = (None if kept is None else kept * grad.to(kept.dtype) for kept in ctx.saved_tensors)
        return hidden, weight, None, None, None, None


def _accumulate(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """total += slope^T hidden, in place, summed in the dtype of `total`."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.mT, hidden)
    else:
        total += slope.mT @ hidden
