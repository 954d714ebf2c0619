"""Linear cross-entropy that never holds all logits (the idea of arXiv 2411.09009 and 2410.10989)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .elementwise import fuse
from .precision import compute_dtype, widen


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
            logits = hidden[part] @ weight_here.mT
            valid = labels[part] != ignore_index
            target = labels[part].where(valid, 0).unsqueeze(1)
            normalizer, losses = _losses(logits, target, valid)
            loss += losses
            if grad_hidden is None and grad_weight is None:
                continue
            slope = _slope(logits, normalizer, target, valid)
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


@fuse
def _losses(logits: Tensor, target: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """log-sum-exp [n, 1] of the logits [n, V], and the sum of the valid rows' losses; in fp32."""
    wide = widen(logits)
    normalizer = wide.logsumexp(1, keepdim=True)
    return normalizer, ((normalizer - wide.gather(1, target)).squeeze(1) * valid).sum()


@fuse
def _slope(logits: Tensor, normalizer: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Gradient of the losses in the logits [n, V], in their dtype: softmax less one at the target."""
    softmax = (widen(logits) - normalizer).exp()
    hit = torch.arange(logits.shape[1], device=logits.device) == target
    return ((softmax - hit.to(softmax.dtype)) * valid.unsqueeze(1)).to(logits.dtype)


def _accumulate(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """total += slope^T hidden, in place, summed in the dtype of `total`."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.mT, hidden)
    elif total.is_cuda:
        torch.addmm(total, slope.mT, hidden, out_dtype=total.dtype, out=total)
    else:
        total += slope.mT @ hidden
