"""What keeps the experts' load even: quantile balancing, the sign rule, the auxiliary loss.

Quantile balancing (Kimi K3, arXiv 2607.24653, 2.3.3 and App. C, D): with s the scores, b the bias and
alpha_t token t's (k+1)-th largest s + b, the margin r_tj = alpha_t - s_tj is the least bias that gets
expert j chosen by token t; its k/E quantile over the batch is the bias that gives j its even share.
The bias chooses and never weighs. Letters: m tokens, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def expert_load(indices: Tensor, experts: int) -> Tensor:
    """Times each expert was chosen, [E] int64, from `indices` [m, k]."""
    return count(indices.flatten(), experts)


def count(values: Tensor, bins: int) -> Tensor:
    """How often each of 0 to bins - 1 is among `values` [n] int64, [bins]: bincount waits for a GPU."""
    return _add_counts(values.new_zeros(bins), values)


def _add_counts(counts: Tensor, values: Tensor) -> Tensor:
    return counts.scatter_add_(0, values, values.new_ones(()).expand_as(values))


def add_margins(
    histogram: Tensor, scores: Tensor, cutoff: Tensor, bias: Tensor, valid: Tensor | None = None
) -> None:
    """Count the margins of one micro-batch into `histogram` [E, bins] int64, in place.

    `scores` [m, E] in (0, 1), `cutoff` [m] the (k+1)-th biased score, `bias` [E] the one that routed,
    `valid` [m] bool leaves tokens out. Bins are equal over [min(bias) - 1, max(bias) + 1], which every
    margin lies in; add only once per token (not in recomputation), and keep the bias until the update.
    """
    experts, bins = histogram.shape
    if valid is not None:
        scores, cutoff = scores[valid], cutoff[valid]
    low, width = _bin_range(bias, bins)
    bin_index = ((cutoff.unsqueeze(1) - scores - low) / width).to(torch.int64).clamp_(0, bins - 1)
    bin_index += torch.arange(experts, device=scores.device) * bins
    _add_counts(histogram.view(-1), bin_index.flatten())


def quantile_bias_from_histogram(histogram: Tensor, bias: Tensor, k: int) -> Tensor:
    """The next bias [E], centred, from the (all-reduced) histogram that `bias` was used for.

    The k/E quantile is interpolated within its bin: at most one bin, (max(bias) - min(bias) + 2) / bins,
    away from the exact one. Without a single margin the bias stays.
    """
    experts, bins = histogram.shape
    tokens = histogram[0].sum()
    share = tokens * k / experts
    cumulative = histogram.cumsum(1)
    found = (cumulative < share.ceil()).sum(1, keepdim=True).clamp(max=bins - 1)
    inside = histogram.gather(1, found)
    below = cumulative.gather(1, found) - inside
    fraction = ((share - below) / inside.clamp(min=1)).clamp(0, 1)
    low, width = _bin_range(bias, bins)
    quantile = low + (found + fraction).squeeze(1) * width
    return torch.where(tokens > 0, quantile - quantile.mean(), bias).to(bias.dtype)


def quantile_bias(scores: Tensor, cutoff: Tensor, k: int) -> Tensor:
    """The exact next bias [E], centred: minus the (q+1)-th largest of s - alpha, q = m k / E."""
    tokens, experts = scores.shape
    rank = min(tokens * k // experts + 1, tokens)
    quantile = (cutoff.unsqueeze(1) - scores).kthvalue(rank, dim=0).values
    return quantile - quantile.mean()


def solve_quantile_bias(scores: Tensor, bias: Tensor, k: int, iterations: int) -> Tensor:
    """Alternate cut-offs and biases on one batch: coordinate descent on the assignment problem's dual."""
    for _ in range(iterations):
        cutoff = (scores + bias).topk(min(k + 1, scores.shape[1]), dim=1).values[:, -1]
        bias = quantile_bias(scores, cutoff, k)
    return bias


def sign_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """b + rate * sign(mean load - load) (DeepSeek-V3, arXiv 2412.19437, 2.1.2); `load` [E] all-reduced."""
    load = load.to(bias.dtype)
    return bias + rate * torch.sign(load.mean() - load)


def auxiliary_loss(
    scores: Tensor, indices: Tensor, rows: int = 1, sum_shards: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """E * sum_j f_j P_j (Switch Transformer, arXiv 2101.03961, Eq. 4) of every row [rows], 1 when it is even.

    `scores` [m, E], row after row; each token's are made to sum to one for P, the mean over a row's tokens.
    f_j is the share of the row's choices `indices` [m, k]. By row, as DeepSeek-V3 (arXiv 2412.19437, Eq. 17
    to 20), so that it is the same however rows are spread; `sum_shards` adds up what several ranks have of
    a row.
    """
    experts, active = scores.shape[1], indices.shape[1]
    chosen = scores.new_zeros(rows, experts)
    chosen.scatter_add_(1, indices.view(rows, -1), scores.new_ones(()).expand(rows, indices.numel() // rows))
    probability = (scores / scores.sum(1, keepdim=True)).view(rows, -1, experts).sum(1)
    tokens = scores.new_full((rows, 1), scores.shape[0] / rows)
    parts = torch.cat([chosen, probability, tokens], 1)
    if sum_shards is not None:
        parts = sum_shards(parts)
    chosen, probability, tokens = parts.split([experts, experts, 1], 1)
    return experts * (chosen / (active * tokens) * probability / tokens).sum(1)


def max_violation(load: Tensor) -> Tensor:
    """Largest load over the mean, minus one (MaxVio, arXiv 2408.15664)."""
    load = load.to(torch.float64)
    return load.max() / load.mean().clamp(min=1e-9) - 1


def update_quantile_bias(
    bias: Tensor, histogram: Tensor, k: int, all_reduce: Callable[[Tensor], None] | None = None
) -> None:
    """All-reduce the counts (summed, in place), replace `bias` in place, and empty the histogram."""
    if all_reduce is not None:
        all_reduce(histogram)
    bias.copy_(quantile_bias_from_histogram(histogram, bias, k))
    histogram.zero_()


def update_sign_bias(
    bias: Tensor, load: Tensor, rate: float, all_reduce: Callable[[Tensor], None] | None = None
) -> None:
    """All-reduce the load (summed, in place), move `bias` in place, and empty the load."""
    if all_reduce is not None:
        all_reduce(load)
    bias.copy_(sign_bias(bias, load, rate))
    load.zero_()


def _bin_range(bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    low = bias.min() - 1
    return low, (bias.max() + 1 - low) / bins
