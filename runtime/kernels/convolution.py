"""The short causal depthwise convolution before delta attention, with SiLU, in plain PyTorch.

Letters: B batch, T tokens, C channels, W taps, N documents.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .documents import positions_from
from .precision import compute_dtype


def plain_short_convolution(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None = None,
    initial: Tensor | None = None,
    output_final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A sum of W shifted products; `short_convolution` in the package's interface documents the arguments."""
    taps = weight.shape[1]
    dtype = compute_dtype(x.dtype)
    weights = weight.to(dtype).unbind(1)
    if cu_seqlens is None:
        before = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if initial is None else initial.to(x.dtype)
        extended = torch.cat((before, x), dim=1)
        tail = extended[:, extended.shape[1] - (taps - 1) :] if output_final else None
        y = _shifted_sum(extended.to(dtype), weights)
        return F.silu(y).to(x.dtype), tail

    positions = positions_from(cu_seqlens, x.shape[0], x.shape[1]).unsqueeze(-1)
    extended = F.pad(x.to(dtype), (0, 0, taps - 1, 0))
    y = _shifted_sum(extended, weights, positions)
    if initial is not None:
        y = _add_history(y, initial.to(dtype), weights, cu_seqlens)
    tail = _tails(x, initial, cu_seqlens, taps - 1) if output_final else None
    return F.silu(y).to(x.dtype), tail


def _shifted_sum(extended: Tensor, weights: tuple[Tensor, ...], positions: Tensor | None = None) -> Tensor:
    """Sum over taps of shifted inputs [B, W-1+T, C]; a tap that reaches before its document adds nothing."""
    taps = len(weights)
    tokens = extended.shape[1] - (taps - 1)
    y = extended[:, taps - 1 :] * weights[-1]
    for shift in range(1, taps):
        shifted = extended[:, taps - 1 - shift :][:, :tokens]
        if positions is not None:
            shifted = shifted.masked_fill(positions < shift, 0)
        y = torch.addcmul(y, shifted, weights[taps - 1 - shift])
    return y


def _add_history(y: Tensor, initial: Tensor, weights: tuple[Tensor, ...], cu_seqlens: Tensor) -> Tensor:
    """Add to the first W-1 tokens of every document what its initial inputs [N, W-1, C] give."""
    taps = len(weights)
    followed = F.pad(initial, (0, 0, 0, taps - 1))
    history = _shifted_sum(followed, weights)  # [N, W-1, C]
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    offset = torch.arange(taps - 1, device=y.device)
    present = offset < lengths.unsqueeze(1)  # [N, W-1]
    index = (starts.unsqueeze(1) + offset)[present]
    return y.flatten(0, 1).index_add(0, index, history[present]).view_as(y)


def _tails(x: Tensor, initial: Tensor | None, cu_seqlens: Tensor, width: int) -> Tensor:
    """The last `width` inputs [N, width, C] of every document, reaching into `initial` when it is short."""
    documents = cu_seqlens.shape[0] - 1
    before = x.new_zeros(documents, width, x.shape[2]) if initial is None else initial.to(x.dtype)
    source = torch.cat((before.flatten(0, 1), x.flatten(0, 1)))
    starts, ends = cu_seqlens[:-1].unsqueeze(1), cu_seqlens[1:].unsqueeze(1)
    token = ends - width + torch.arange(width, device=x.device)  # [N, width]
    first = torch.arange(documents, device=x.device).unsqueeze(1) * width
    index = torch.where(token >= starts, documents * width + token, first + width + token - starts)
    return source[index.flatten()].view(documents, width, -1)
