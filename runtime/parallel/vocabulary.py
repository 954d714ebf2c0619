"""Embedding, logits and loss when each rank holds a part of the vocabulary (arXiv 1909.08053, section 3).

Letters: N tokens, D width, v = vocabulary / tp rows on this rank, of which the first is rank * v.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shipway.runtime.kernels.loss import chunk_rows
from shipway.runtime.kernels.precision import compute_dtype
from shipway.runtime.parallel.token_collectives import gather_columns, sum_tokens

IGNORED = -100


def embed_tokens(weight: Tensor, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of the embeddings, [B, T / tp, D], from weight [v, D] and tokens [B, T]."""
    local, mine = _local_rows(tokens, weight.shape[0], group)
    return sum_tokens(F.embedding(local, weight) * mine.unsqueeze(-1), group)


def read_out(weight: Tensor, x: Tensor, labels: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """x [B, T, D] -> logits [B, T, vocabulary] on every rank; with labels [B, T] the sum of their losses."""
    if labels is None:
        return gather_columns(F.linear(x, weight), group)
    return vocabulary_cross_entropy(x.flatten(0, 1), weight, labels.flatten(), group)


def vocabulary_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup, chunk: int | None = None
) -> Tensor:
    """`kernels.linear_cross_entropy` over all ranks' rows: the same scalar on every rank.

    `hidden` [N, D] equal on all ranks, `weight` [v, D], `labels` [N] with -100 ignored. The gradient of
    `hidden` is this rank's part of a sum over ranks, which whoever gathered the tokens takes.
    """
    rows = chunk or chunk_rows(hidden.shape[0], hidden.shape[1], weight.shape[0])
    return _VocabularyCrossEntropy.apply(hidden, weight, labels, group, rows, torch.is_grad_enabled())


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Gradients are formed in the forward pass, so that logits exist for `rows` tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup,
        rows: int,
        grads: bool,
    ) -> Tensor:
        wide = compute_dtype(hidden.dtype)
        weight_here = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if grads else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if grads else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = (hidden[part] @ weight_here.mT).to(wide)
            found, slope = _loss_and_slope(logits, labels[part], group)
            loss += found
            if grad_hidden is not None and grad_weight is not None:
                slope = slope.to(hidden.dtype)
                grad_hidden[part] = slope @ weight_here
                grad_weight += slope.mT @ hidden[part]
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = (kept * grad.to(kept.dtype) for kept in ctx.saved_tensors)
        return hidden, weight, None, None, None, None


def _loss_and_slope(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Summed loss of the tokens, and its gradient by this rank's logits [n, v] (written over them)."""
    valid = labels != IGNORED
    largest = logits.amax(1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits = logits.sub_(largest)
    target, mine = _local_rows(labels, logits.shape[1], group)
    chosen = logits.gather(1, target.unsqueeze(1)).squeeze(1) * mine
    slope = logits.exp_()
    sums = torch.stack([slope.sum(1), chosen])
    dist.all_reduce(sums, group=group)
    total, chosen = sums
    loss = ((total.log() - chosen) * valid).sum()
    slope.div_(total.unsqueeze(1)).scatter_add_(1, target.unsqueeze(1), -mine.to(slope.dtype).unsqueeze(1))
    return loss, slope.mul_(valid.unsqueeze(1))


def _local_rows(tokens: Tensor, rows: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Rows of this rank's part that tokens stand for, 0 for those of others, and which are its own."""
    local = tokens - dist.get_rank(group) * rows
    mine = (local >= 0) & (local < rows)
    return local.where(mine, 0), mine
