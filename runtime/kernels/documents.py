"""Documents packed into one batch: positions, and chunks that never cross a boundary.

`cu_seqlens` [n+1] holds the cumulative lengths of the n documents of the flattened B*T tokens, from 0
to B*T; None means that each of the B rows is one document. Lengths of zero are allowed. The tensor is
taken as immutable: whatever is derived from it may be cached while it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@cache
def _derived() -> WeakTensorKeyDictionary:
    return WeakTensorKeyDictionary()


def derived(cu_seqlens: Tensor, name: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` makes of these boundaries, kept under `name` as long as they live: one for all layers."""
    known = _derived().setdefault(cu_seqlens, {})
    if name not in known:
        known[name] = make()
    return known[name]


def document_lengths(cu_seqlens: Tensor | None, batch: int, tokens: int) -> list[int]:
    """Length of every document; `tokens` is the length of one row.

    Raises ValueError when the boundaries do not span the batch or run backwards.
    """
    if cu_seqlens is None:
        return [tokens] * batch
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != batch * tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to {batch * tokens}, the tokens of the batch: {bounds}"
        )
    return lengths


def document_of_token(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Index [tokens] of the document that each token of the flattened batch belongs to."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)


def positions_from(
    cu_seqlens: Tensor | None, batch: int, tokens: int, device: torch.device | str | None = None
) -> Tensor:
    """Position [B, T] int64 of every token within its document, from 0."""
    if cu_seqlens is None:
        return torch.arange(tokens, device=device).expand(batch, tokens)
    index = torch.arange(batch * tokens, device=cu_seqlens.device)
    starts = cu_seqlens[:-1].to(torch.int64)[document_of_token(cu_seqlens, batch * tokens)]
    return (index - starts).view(batch, tokens)


@dataclass(frozen=True)
class ChunkLayout:
    """Documents cut into chunks of C tokens, in the order in which a scan over chunks visits them.

    Step c of the scan takes chunk c of every document that has one, longest documents first, so the
    documents still running are always a prefix of those of the step before.
    """

    batch: int
    tokens: int
    chunk: int
    running: tuple[int, ...]
    """Documents that have a chunk c, for every step c; never rises."""
    order: tuple[int, ...]
    """Documents, longest first."""
    slots: Tensor | None
    """Slot [B*T] of every token in the chunked order; None when the rows are the documents."""

    def split(self, x: Tensor) -> Tensor:
        """[B, T, ...] to [chunks, C, ...]; slots past a document's end are zero."""
        if self.slots is None:
            steps = len(self.running)
            missing = steps * self.chunk - self.tokens
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x
            x = x.reshape(self.batch, steps, self.chunk, *x.shape[2:])
            return x.transpose(0, 1).flatten(0, 1)
        flat = x.flatten(0, 1)
        padded = flat.new_zeros(sum(self.running) * self.chunk, *flat.shape[1:])
        return padded.index_copy(0, self.slots, flat).unflatten(0, (-1, self.chunk))

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`: [chunks, C, ...] to [B, T, ...]."""
        if self.slots is None:
            x = x.unflatten(0, (len(self.running), self.batch)).transpose(0, 1).flatten(1, 2)
            return x[:, : self.tokens]
        return x.flatten(0, 1).index_select(0, self.slots).unflatten(0, (self.batch, self.tokens))


def chunk_layout(cu_seqlens: Tensor | None, batch: int, tokens: int, chunk: int) -> ChunkLayout:
    """Cut the documents of a batch of `batch` rows of `tokens` into chunks of at most `chunk`."""
    if cu_seqlens is None:
        steps = -(-tokens // chunk)
        return ChunkLayout(batch, tokens, chunk, (batch,) * steps, tuple(range(batch)), None)
    counts = [-(-length // chunk) for length in document_lengths(cu_seqlens, batch, tokens)]
    order = sorted(range(len(counts)), key=lambda n: -counts[n])
    running = tuple(sum(count > step for count in counts) for step in range(max(counts, default=0)))
    device = cu_seqlens.device
    rank = torch.empty(len(counts), dtype=torch.int64, device=device)
    rank[torch.tensor(order, device=device)] = torch.arange(len(counts), device=device)
    before = torch.tensor((0, *running[:-1]), device=device).cumsum(0)
    position = positions_from(cu_seqlens, batch, tokens).flatten()
    document = document_of_token(cu_seqlens, batch * tokens)
    slots = (before[position // chunk] + rank[document]) * chunk + position % chunk
    return ChunkLayout(batch, tokens, chunk, running, tuple(order), slots)
