"""Slices of rows over context-parallel ranks: what a rank makes of document boundaries, and what it gathers.

Every rank runs the same collectives in the same order, forward and backward, whatever its documents: what
a rank does not need is masked, never left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Slice:
    """One rank's slice [B, T] of every row, and how documents enter it."""

    cu_seqlens: Tensor
    """[n+1] int32: boundaries within the slice, of the flattened B*T tokens; every row starts a piece."""
    carried: tuple[int, ...]
    """Tokens before the slice of the document that each row's slice opens with."""
    opening: tuple[int, ...]
    """Length in the slice of that document."""
    first_piece: Tensor
    """[B] int64: number of each row's first piece."""
    tail: Tensor
    """[m] int64: flattened tokens of each row's last piece, row after row."""
    tail_cu_seqlens: Tensor
    """[B+1] int32: boundaries of those."""
    passes: Tensor
    """[ranks, B] bool: whether no document starts in a rank's slice, so that the state passes through."""
    positions: Tensor
    """[B, T] int64: position of every token within its whole document."""

    @property
    def is_inside(self) -> bool:
        """Whether every row's slice is the middle or the end of one document."""
        tokens = self.positions.shape[1]
        return all(self.carried) and all(opening == tokens for opening in self.opening)


def cut(cu_seqlens: Tensor, batch: int, tokens: int, rank: int, ranks: int) -> Slice:
    """What rank `rank` makes of boundaries `cu_seqlens` of whole rows; `tokens` is a slice's length."""
    device, whole = cu_seqlens.device, tokens * ranks
    if int(cu_seqlens[-1]) != batch * whole:
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, the rows have {batch * whole} tokens")
    starts: list[list[int]] = [[0] for _ in range(batch)]
    for bound in sorted(set(cu_seqlens.tolist())):
        if bound < batch * whole and bound % whole:
            starts[bound // whole].append(bound % whole)
    low, high = rank * tokens, (rank + 1) * tokens
    bounds: list[int] = []
    carried, opening, first_piece, tails, positions = [], [], [], [], []
    for row, begins in enumerate(starts):
        entering = max(start for start in begins if start <= low)
        inside = [start for start in begins if low < start < high]
        pieces = [low, *inside]
        first_piece.append(len(bounds))
        bounds += [row * tokens + start - low for start in pieces]
        carried.append(low - entering)
        opening.append((inside[0] if inside else high) - low)
        tails.append(torch.arange(row * tokens + pieces[-1] - low, (row + 1) * tokens))
        ends = [*inside, high]
        lengths = zip([entering, *inside], pieces, ends, strict=True)
        positions.append(
            torch.cat([torch.arange(first - start, end - start) for start, first, end in lengths])
        )
    bounds.append(batch * tokens)
    lengths_of_tails = torch.tensor([0, *(len(tail) for tail in tails)])
    passes = [
        [not any(r * tokens <= start < (r + 1) * tokens for start in begins) for begins in starts]
        for r in range(ranks)
    ]
    return Slice(
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device),
        carried=tuple(carried),
        opening=tuple(opening),
        first_piece=torch.tensor(first_piece, device=device),
        tail=torch.cat(tails).to(device),
        tail_cu_seqlens=lengths_of_tails.cumsum(0).to(torch.int32).to(device),
        passes=torch.tensor(passes, device=device),
        positions=torch.stack(positions).to(device),
    )


@dataclass
class Rows:
    """Slices of rows over a process group; what was derived from boundaries is kept while they live."""

    group: dist.ProcessGroup
    _cuts: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    @property
    def rank(self) -> int:
        """Which slice this rank holds."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """Slices of a row."""
        return dist.get_world_size(self.group)

    def slice(self, cu_seqlens: Tensor | None, x: Tensor) -> Slice:
        """This rank's slice, of which `x` [B, T, ...] are the tokens."""
        return self._cut(cu_seqlens, x, self.rank, self.ranks)

    def chunk(self, cu_seqlens: Tensor | None, x: Tensor, number: int) -> Slice:
        """Chunk `number` of the row's 2 x ranks, of which `x` [B, T / 2, ...] are the tokens."""
        return self._cut(cu_seqlens, x, number, 2 * self.ranks)

    def _cut(self, cu_seqlens: Tensor | None, x: Tensor, number: int, parts: int) -> Slice:
        batch, tokens = x.shape[:2]
        if cu_seqlens is None:
            whole = tokens * parts
            bounds = torch.arange(0, batch * whole + 1, whole, dtype=torch.int32, device=x.device)
            return cut(bounds, batch, tokens, number, parts)
        known: dict[tuple[int, int], Slice] = self._cuts.setdefault(cu_seqlens, {})
        if (number, parts) not in known:
            known[number, parts] = cut(cu_seqlens, batch, tokens, number, parts)
        return known[number, parts]

    def whole(self, x: Tensor) -> Tensor:
        """[B, T, ...] of every rank in row order: [B, ranks * T, ...]."""
        return self.all(x).transpose(0, 1).flatten(1, 2)

    def all(self, x: Tensor) -> Tensor:
        """`x` of every rank, stacked [ranks, ...]."""
        gathered: Tensor = _AllGather.apply(x, self.group)
        return gathered


class _AllGather(torch.autograd.Function):
    """Stacks a tensor over ranks; backward sums each rank's gradient where it came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ranks = dist.get_world_size(group)
        flat = x.new_empty(ranks * x.numel())
        dist.all_gather_into_tensor(flat, x.contiguous().view(-1), group=group)
        return flat.view(ranks, *x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        mine = gradient.new_empty(gradient[0].numel())
        dist.reduce_scatter_tensor(mine, gradient.contiguous().view(-1), group=ctx.group)
        return mine.view(gradient.shape[1:]), None
