"""Muon on parameters that FSDP and tensor parallel have sharded (arXiv 2502.16982; per head as Kimi K3).

Orthogonalisation needs whole matrices. A rank whose block consists of whole units (heads, experts, or
everything) works on its own; otherwise the ranks that cut a matrix exchange blocks. Ranks that hold copies of
the same parameters share the matrices among them and send each other the updates (muon_exchange).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shipway.runtime.muon_exchange import (
    Piece,
    assign_owners,
    coordinates_over,
    gather_to_owners,
    group_over,
    scatter_from_owners,
    share_with_copies,
)
from shipway.runtime.newton_schulz import SLICE_ELEMENTS, orthogonalise
from shipway.runtime.optimizer_state import OptimizerState, StatePiece, make_state
from shipway.runtime.shards import Block, block_of, local_tensor, sharded_axes

ROUND_BYTES = 512 * 2**20
"""Whole matrices in flight in one exchange over a group, so that scratch stays bounded."""


Kind = tuple[object, tuple[int, ...], tuple[dist.ProcessGroup, ...]]
"""What parameters that take part in one exchange have in common: mesh, axes that cut them, copies."""


@dataclass(frozen=True)
class MuonOptions:
    """Hyper-parameters of Muon."""

    momentum: float
    steps: int
    update_rms: float
    weight_decay: float
    product_dtype: torch.dtype
    momentum_dtype: torch.dtype


@dataclass(frozen=True)
class MuonParameter:
    """A matrix of `heads` row blocks, or a stack of matrices."""

    name: str
    parameter: Tensor
    heads: int = 1
    """Row blocks orthogonalised apart; a three-dimensional parameter is always taken slice by slice."""
    copies: tuple[dist.ProcessGroup, ...] = ()
    """Groups of ranks that hold the same block, one inside the other."""

    @property
    def is_stack(self) -> bool:
        """Whether the leading dimension counts matrices."""
        return self.parameter.ndim == 3

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one orthogonalised matrix."""
        rows, columns = self.parameter.shape[-2:]
        return (rows if self.is_stack else rows // self.heads, columns)

    def units(self, rows: Tensor) -> Tensor:
        """A block of whole units as [k, rows, columns]."""
        return rows if rows.ndim == 3 else rows.view(-1, *self.matrix)

    @property
    def cut_by(self) -> tuple[int, ...]:
        """Mesh dimensions whose ranks hold parts of one unit; empty when every rank has whole units."""
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return ()
        axes = sharded_axes(parameter)
        if self.is_stack:
            return tuple(axis for axis in axes if parameter.placements[axis].dim > 0)
        blocks = [block_of(parameter, where) for where in coordinates_over(parameter, axes)]
        return () if all(self._is_whole(block) for block in blocks) else axes

    def _is_whole(self, block: Block) -> bool:
        rows, columns = self.matrix
        return block.size[1] == columns and block.offset[0] % rows == 0 and block.size[0] % rows == 0

    def pieces(self, direction: Tensor, cut_by: tuple[int, ...]) -> list[Piece]:
        """What must be brought together: the matrix, or each slice of this rank's part of the stack."""
        parameter = self.parameter
        assert isinstance(parameter, DTensor)
        blocks = [block_of(parameter, where) for where in coordinates_over(parameter, cut_by)]
        if not self.is_stack:
            return [Piece(tuple(parameter.shape), tuple(blocks), direction, self.work)]
        inner = tuple(Block(block.offset[1:], block.size[1:]) for block in blocks)
        shape = tuple(parameter.shape[1:])
        return [Piece(shape, inner, part, self.work) for part in direction]

    @property
    def work(self) -> float:
        """Multiply-adds of one Newton-Schulz step over one piece, to even out owners."""
        rows, columns = self.matrix
        small, large = min(rows, columns), max(rows, columns)
        return self.heads * (2 * small**2 * large + small**3)

    def work_on(self, block: Tensor) -> float:
        """This rank's share of the multiply-adds, to even out copies."""
        return self.work / self.heads * block.numel() / math.prod(self.matrix)


def _slices(chosen: Sequence[int], directions: Sequence[Tensor]) -> Iterator[list[int]]:
    """Runs of `chosen` whose directions hold no more than Newton-Schulz takes at a time, or one alone."""
    some: list[int] = []
    elements = 0
    for i in chosen:
        if some and elements + directions[i].numel() > SLICE_ELEMENTS:
            yield some
            some, elements = [], 0
        some.append(i)
        elements += directions[i].numel()
    if some:
        yield some


@dataclass
class Muon:
    """Momentum, Nesterov, Newton-Schulz, decoupled decay: W <- (1 - lr wd) W - lr rms sqrt(max(n, m)) O."""

    parameters: Sequence[MuonParameter]
    options: MuonOptions
    host: torch.device | None = None
    """Device whose host's memory keeps the momentum; None: the parameters' own."""
    momentum: dict[str, Tensor] = field(init=False)
    _state: OptimizerState = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._alike: dict[Kind, list[MuonParameter]] = defaultdict(list)
        for item in self.parameters:
            cut_by = item.cut_by
            mesh = item.parameter.device_mesh if cut_by else None  # type: ignore[attr-defined]
            self._alike[mesh, cut_by, item.copies].append(item)
        ordered = [item for items in self._alike.values() for item in items]
        self._state = make_state([p.parameter for p in ordered], (self.options.momentum_dtype,), self.host)
        self.momentum = dict(zip([p.name for p in ordered], self._state.kinds[0], strict=True))

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter from its gradient; all ranks that share parameters must call it together."""
        walk = self._state.walk()
        pieces = (list_of for _, list_of in groupby(walk, key=lambda piece: piece.index))
        for (_, cut_by, copies), items in self._alike.items():
            cutters = dist.get_world_size(group_over(items[0].parameter, cut_by)) if cut_by else 1  # type: ignore[arg-type]
            for some in rounds(items, cutters * math.prod(map(dist.get_world_size, copies))):
                directions = [self._direction(item, next(pieces)) for item in some]
                updates = self._shared(some, directions, cut_by, copies)
                for item, update in zip(some, updates, strict=True):
                    if update.numel():
                        self._apply(item, update, learning_rate)
        assert next(walk, None) is None

    def _shared(
        self,
        items: Sequence[MuonParameter],
        directions: Sequence[Tensor],
        cut_by: tuple[int, ...],
        copies: tuple[dist.ProcessGroup, ...],
    ) -> list[Tensor]:
        """This rank's blocks of the updates: of each group of copies one rank makes one, and all get it."""
        if not items:
            return []
        if not copies:
            return self._together(items, directions, cut_by) if cut_by else self._alone(items, directions)
        group, *inner = copies
        work = [item.work_on(direction) for item, direction in zip(items, directions, strict=True)]
        owners = assign_owners(work, dist.get_world_size(group))
        mine = [i for i, owner in enumerate(owners) if owner == dist.get_rank(group)]
        made = self._shared([items[i] for i in mine], [directions[i] for i in mine], cut_by, tuple(inner))
        return share_with_copies(made, directions, owners, group)

    def _alone(self, items: Sequence[MuonParameter], directions: Sequence[Tensor]) -> list[Tensor]:
        """Matrices of one shape go together: each alone may cost the host more than it does the device."""
        made = list(directions)
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, (item, direction) in enumerate(zip(items, directions, strict=True)):
            if direction.numel():
                alike[item.matrix].append(i)
        for some in (some for each in alike.values() for some in _slices(each, directions)):
            units = [items[i].units(directions[i]) for i in some]
            done = self._orthogonal(torch.cat(units) if len(units) > 1 else units[0])
            for i, part in zip(some, done.split([len(unit) for unit in units]), strict=True):
                made[i] = part.reshape(directions[i].shape)
        return made

    def _direction(self, item: MuonParameter, pieces: Iterator[StatePiece]) -> Tensor:
        """This rank's block of the Nesterov momentum, fp32; updates the momentum."""
        direction = torch.empty_like(local_tensor(item.parameter), dtype=torch.float32)
        for piece in pieces:
            (momentum,), part = piece.state, piece.of(direction)
            momentum.mul_(self.options.momentum)
            if item.parameter.grad is None:
                torch.mul(momentum.float(), self.options.momentum, out=part)
            else:
                gradient = piece.of(local_tensor(item.parameter.grad).contiguous())
                momentum.add_(gradient)
                torch.add(gradient.float(), momentum.float(), alpha=self.options.momentum, out=part)
        return direction

    def _orthogonal(self, units: Tensor) -> Tensor:
        return orthogonalise(units, self.options.steps, self.options.product_dtype)

    def _apply(self, item: MuonParameter, update: Tensor, learning_rate: float) -> None:
        scale = self.options.update_rms * math.sqrt(max(item.matrix))
        local = local_tensor(item.parameter)
        local.mul_(1 - learning_rate * self.options.weight_decay)
        local.add_(update.to(local.dtype), alpha=-learning_rate * scale)

    def _together(
        self, items: Sequence[MuonParameter], directions: Sequence[Tensor], cut_by: tuple[int, ...]
    ) -> list[Tensor]:
        group = group_over(items[0].parameter, cut_by)  # type: ignore[arg-type]
        pieces_of = [item.pieces(d, cut_by) for item, d in zip(items, directions, strict=True)]
        pieces = [piece for some in pieces_of for piece in some]
        owner_items = [item for item, some in zip(items, pieces_of, strict=True) for _ in some]
        owners = assign_owners([piece.work for piece in pieces], dist.get_world_size(group))
        wholes = gather_to_owners(pieces, owners, group)
        made = self._orthogonal_together(owner_items, wholes)
        parts = iter(scatter_from_owners(pieces, made, owners, group))
        updates = []
        for some, direction in zip(pieces_of, directions, strict=True):
            mine = [next(parts) for _ in some]
            updates.append(torch.stack(mine).view_as(direction) if mine else direction)
        return updates

    def _orthogonal_together(
        self, items: Sequence[MuonParameter], wholes: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Updates of the matrices that this rank owns; those of one shape share their batched products."""
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, whole in enumerate(wholes):
            if whole is not None:
                by_shape[items[index].matrix].append(index)
        updates: list[Tensor | None] = [None] * len(wholes)
        for matrix, indices in by_shape.items():
            units = [wholes[index].view(-1, *matrix) for index in indices]  # type: ignore[union-attr]
            made = self._orthogonal(torch.cat(units)).split([len(unit) for unit in units])
            for index, update in zip(indices, made, strict=True):
                updates[index] = update.reshape(wholes[index].shape)  # type: ignore[union-attr]
        return updates


def rounds(items: Sequence[MuonParameter], ranks: int) -> list[list[MuonParameter]]:
    """Cut a list into rounds whose whole matrices stay under the scratch bound, but at least one per rank."""
    result: list[list[MuonParameter]] = [[]]
    held_bytes = 0
    for item in items:
        if held_bytes >= ROUND_BYTES and len(result[-1]) >= ranks:
            result.append([])
            held_bytes = 0
        result[-1].append(item)
        held_bytes += item.parameter.numel() * 4
    return result
