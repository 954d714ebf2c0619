"""The delta rule under context parallel, in two forms that the layout chooses between.

state: every rank runs its own slice, from the state that the slices before it leave. A slice is an affine
map of the state, so one all-gather of (transition, written) lets every rank compose its own (Kimi K3, arXiv
2607.24653, 5.1.2); bytes do not grow with the context.

heads: an all-to-all turns slices of all heads into whole rows of some heads, and another turns the output
back (Ulysses, arXiv 2309.14509); bytes grow with the slice, but nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shipway.runtime.kernels import DeltaCore, delta_rule, delta_segment
from shipway.runtime.parallel.exchange import exchange_rows
from shipway.runtime.parallel.rows import Rows, Slice


class StateDeltaCore(nn.Module):
    """The delta rule on a slice, from the state that the slices before it leave."""

    def __init__(self, core: DeltaCore, rows: Rows) -> None:
        super().__init__()
        self.lower_bound, self.chunk, self.rows = core.lower_bound, core.chunk, rows

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
    ) -> tuple[Tensor, None]:
        """As DeltaCore, on slices; `cu_seqlens` bounds the documents of whole rows."""
        part = self.rows.slice(cu_seqlens, q)
        options: dict[str, Any] = {"lower_bound": self.lower_bound, "chunk": self.chunk}
        tails = (x.flatten(0, 1).index_select(0, part.tail).unsqueeze(0) for x in (k, v, g, beta))
        transition, written = delta_segment(
            *tails, a_log, dt_bias, cu_seqlens=part.tail_cu_seqlens, **options
        )
        maps = self.rows.all(torch.cat((transition, written), dim=-1))  # [ranks, B, HV, K, K+V]
        entering = self._compose(maps, part)
        pieces = len(part.cu_seqlens) - 1
        initial = entering.new_zeros(pieces, *entering.shape[1:]).index_copy(0, part.first_piece, entering)
        o, _ = delta_rule(
            q, k, v, g, beta, a_log, dt_bias, cu_seqlens=part.cu_seqlens, initial_state=initial, **options
        )
        return o, None

    def _compose(self, maps: Tensor, part: Slice) -> Tensor:
        """State [B, HV, K, V] that enters this rank's slice, zero where a document begins with it."""
        key_width = maps.shape[-2]
        transitions, written = maps.split((key_width, maps.shape[-1] - key_width), dim=-1)
        state = torch.zeros_like(written[0])
        for rank in range(self.rows.rank):
            passed = transitions[rank] @ state
            state = passed.masked_fill(~part.passes[rank].view(-1, 1, 1, 1), 0) + written[rank]
        # Rank 0 needs no map, but must take part in the gather's backward.
        state = state if self.rows.rank else written[0]
        fresh = torch.tensor(part.carried, device=state.device) == 0
        return state.masked_fill(fresh.view(-1, 1, 1, 1), 0)


class HeadsDeltaCore(nn.Module):
    """The delta rule on whole rows, of this rank's share of the heads."""

    def __init__(self, core: DeltaCore, rows: Rows) -> None:
        super().__init__()
        self.lower_bound, self.chunk, self.rows = core.lower_bound, core.chunk, rows

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
    ) -> tuple[Tensor, None]:
        """As DeltaCore, on slices; `cu_seqlens` bounds the documents of whole rows."""
        # Value heads stand beside the key head that they share, so that one exchange takes all.
        heads, parts = q.shape[2], (q, k, v, g, beta.unsqueeze(-1))
        packed = torch.cat([part.unflatten(2, (heads, -1)).flatten(3) for part in parts], dim=-1)
        widths = [part.shape[2] // heads * part.shape[3] for part in parts]
        rows = heads_for_slices(packed, self.rows).split(widths, dim=-1)
        q, k, v, g, beta = (
            row.unflatten(-1, (-1, part.shape[3])).flatten(2, 3)
            for row, part in zip(rows, parts, strict=True)
        )
        ranks, rank = self.rows.ranks, self.rows.rank
        o, _ = delta_rule(
            *(q, k, v, g, beta.squeeze(-1)),
            a_log.chunk(ranks)[rank],
            dt_bias.chunk(ranks)[rank],
            lower_bound=self.lower_bound,
            chunk=self.chunk,
            cu_seqlens=cu_seqlens,
        )
        return slices_for_heads(o, self.rows), None


def heads_for_slices(x: Tensor, rows: Rows) -> Tensor:
    """This rank's slice [B, T, H, ...] of all heads -> whole rows [B, ranks * T, H / ranks, ...] of some."""
    one_each = [1] * rows.ranks
    by_heads = x.unflatten(2, (rows.ranks, -1)).movedim(2, 0)  # [ranks, B, T, H / ranks, ...]
    return exchange_rows(by_heads, one_each, one_each, rows.group).transpose(0, 1).flatten(1, 2)


def slices_for_heads(x: Tensor, rows: Rows) -> Tensor:
    """Whole rows [B, ranks * T, h, ...] of this rank's heads -> its slice [B, T, ranks * h, ...] of all."""
    one_each = [1] * rows.ranks
    by_slices = x.unflatten(1, (rows.ranks, -1)).movedim(1, 0)  # [ranks, B, T, h, ...]
    return exchange_rows(by_slices, one_each, one_each, rows.group).movedim(0, 2).flatten(2, 3)
