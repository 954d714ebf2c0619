"""Softmax attention under context parallel, causal work shared evenly.

Every rank gathers keys and values of whole rows. Of the queries, the last slice would have nearly twice the
average work; so a row is cut into twice as many chunks as there are ranks, and rank r attends for chunks r
and 2n - 1 - r, whose work adds up to the same on every rank (as in Llama 3, arXiv 2407.21783, 3.3.2). An
all-to-all brings the queries there and another the outputs back: everything else keeps contiguous slices,
which the recurrence needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.kernels import SoftmaxCore, softmax_attention
from shipway.runtime.parallel.exchange import exchange_rows
from shipway.runtime.parallel.rows import Rows

QUERY_BLOCK = 2048
"""Queries that attend to earlier chunks at a time, so that their mask stays small."""


@dataclass(frozen=True)
class Exchange:
    """Which chunks a rank holds, and which it attends for."""

    order: tuple[int, ...]
    """Places of its two chunks, by the rank that they go to."""
    sent: tuple[int, ...]
    """Chunks that go to each rank."""
    received: tuple[int, ...]
    """Chunks that come from each rank."""
    chunks: tuple[int, int]
    """Numbers, in the row, of those that it attends for, in the order in which they come."""


def balanced(rank: int, ranks: int) -> Exchange:
    """The exchange of rank `rank`, which holds chunks 2 rank and 2 rank + 1."""
    held = (2 * rank, 2 * rank + 1)
    owners = [min(chunk, 2 * ranks - 1 - chunk) for chunk in held]
    chunks = (rank, 2 * ranks - 1 - rank)
    sources = [chunk // 2 for chunk in chunks]
    return Exchange(
        order=tuple(sorted(range(2), key=lambda place: owners[place])),
        sent=tuple(owners.count(peer) for peer in range(ranks)),
        received=tuple(sources.count(peer) for peer in range(ranks)),
        chunks=chunks,
    )


class ContextSoftmaxCore(nn.Module):
    """Softmax attention of slices of queries to the keys of whole rows."""

    def __init__(self, core: SoftmaxCore, rows: Rows, gathered: bool) -> None:
        super().__init__()
        self.scale, self.rows = core.scale, rows
        self.exchange = balanced(rows.rank, rows.ranks)
        self.is_gathered = gathered
        """Whether keys and values come gathered, made from gathered latents."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """q [B, T, H, K]; k, v [B, T or ranks * T, Hkv, ...], gathered already in the second case.

        `cu_seqlens` bounds the documents of whole rows.
        """
        if q.shape[1] % 2:
            raise Fatal(f"context parallel cannot halve slices of {q.shape[1]} tokens")
        k, v = self.gathered(k, v)
        plan, group = self.exchange, self.rows.group
        halves = q.unflatten(1, (2, -1)).movedim(1, 0)  # [2, B, c, H, K]
        mine = exchange_rows(halves[list(plan.order)], plan.sent, plan.received, group)
        done = torch.stack(
            [self._attend(x, k, v, chunk, cu_seqlens) for x, chunk in zip(mine, plan.chunks, strict=True)]
        )
        back = exchange_rows(done, plan.received, plan.sent, group)
        return back[list(plan.order)].transpose(0, 1).flatten(1, 2)  # of two, an order undoes itself

    def gathered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole rows."""
        if self.is_gathered:
            return k, v
        both = self.rows.whole(torch.cat((k, v), dim=-1))
        k, v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
        return k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, chunk: int, cu_seqlens: Tensor | None) -> Tensor:
        """Outputs of chunk number `chunk` of every row, q [B, c, H, K]."""
        tokens = q.shape[1]
        first, end = chunk * tokens, (chunk + 1) * tokens
        part = self.rows.chunk(cu_seqlens, q, chunk)
        within = None
        if not part.is_inside:
            own = (x[:, first:end] for x in (k, v))
            within = softmax_attention(q, *own, scale=self.scale, cu_seqlens=part.cu_seqlens)
        lines = []
        for row, (carried, opening) in enumerate(zip(part.carried, part.opening, strict=True)):
            line = [] if within is None else [within[row, opening if carried else 0 :]]
            if carried:
                keys = slice(first - carried, end)
                line.insert(0, self._reach(q[row, :opening], k[row, keys], v[row, keys], carried))
            lines.append(torch.cat(line))
        return torch.stack(lines)

    def _reach(self, q: Tensor, k: Tensor, v: Tensor, carried: int) -> Tensor:
        """Queries [t, H, K] of one document that goes on, `carried` keys after its start."""
        blocks = []
        for start in range(0, len(q), QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, len(q))
            some = (x.unsqueeze(0) for x in (q[start:end], k[: carried + end], v[: carried + end]))
            blocks.append(softmax_attention(*some, scale=self.scale).squeeze(0))
        return torch.cat(blocks)
