"""Muon on parameters that FSDP and tensor parallel have sharded (arXiv 2502.16982; per head as Kimi K3).

Orthogonalisation needs whole matrices. A rank whose block consists of whole units (heads, experts, or
everything) works on its own; otherwise the ranks that cut a matrix exchange blocks (muon_exchange).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

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
)
from shipway.runtime.newton_schulz import orthogonalise
from shipway.runtime.shards import Block, block_of, like, local_tensor, sharded_axes

ROUND_BYTES = 512 * 2**20
"""Whole matrices in flight in one exchange over a group, so that scratch stays bounded."""


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


@dataclass
class Muon:
    """Momentum, Nesterov, Newton-Schulz, decoupled decay: W <- (1 - lr wd) W - lr rms sqrt(max(n, m)) O."""

    parameters: Sequence[MuonParameter]
    options: MuonOptions
    momentum: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.momentum = {p.name: like(p.parameter, self.options.momentum_dtype) for p in self.parameters}
        self._alone: list[MuonParameter] = []
        self._together: dict[tuple[object, tuple[int, ...]], list[MuonParameter]] = defaultdict(list)
        for item in self.parameters:
            if cut_by := item.cut_by:
                self._together[(item.parameter.device_mesh, cut_by)].append(item)  # type: ignore[attr-defined]
            else:
                self._alone.append(item)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter from its gradient; all ranks that share parameters must call it together."""
        for item in self._alone:
            direction = self._direction(item)
            if direction.numel():
                update = self._orthogonal(item.units(direction)).reshape(direction.shape)
                self._apply(item, update, learning_rate)
        for (_, cut_by), items in self._together.items():
            group = group_over(items[0].parameter, cut_by)  # type: ignore[arg-type]
            for some in rounds(items, dist.get_world_size(group)):
                self._step_together(some, cut_by, group, learning_rate)

    def _direction(self, item: MuonParameter) -> Tensor:
        """This rank's block of the Nesterov momentum, fp32; updates the momentum."""
        momentum = local_tensor(self.momentum[item.name])
        gradient = item.parameter.grad
        if gradient is None:
            momentum.mul_(self.options.momentum)
            return momentum.float() * self.options.momentum
        gradient = local_tensor(gradient)
        momentum.mul_(self.options.momentum).add_(gradient)
        return torch.add(gradient.float(), momentum.float(), alpha=self.options.momentum)

    def _orthogonal(self, units: Tensor) -> Tensor:
        return orthogonalise(units, self.options.steps, self.options.product_dtype)

    def _apply(self, item: MuonParameter, update: Tensor, learning_rate: float) -> None:
        scale = self.options.update_rms * math.sqrt(max(item.matrix))
        local = local_tensor(item.parameter)
        local.mul_(1 - learning_rate * self.options.weight_decay)
        local.add_(update.to(local.dtype), alpha=-learning_rate * scale)

    def _step_together(
        self,
        items: Sequence[MuonParameter],
        cut_by: tuple[int, ...],
        group: dist.ProcessGroup,
        learning_rate: float,
    ) -> None:
        pieces_of = [item.pieces(self._direction(item), cut_by) for item in items]
        pieces = [piece for some in pieces_of for piece in some]
        owner_items = [item for item, some in zip(items, pieces_of, strict=True) for _ in some]
        owners = assign_owners([piece.work for piece in pieces], dist.get_world_size(group))
        wholes = gather_to_owners(pieces, owners, group)
        updates = self._orthogonal_together(owner_items, wholes)
        parts = iter(scatter_from_owners(pieces, updates, owners, group))
        for item, some in zip(items, pieces_of, strict=True):
            mine = [next(parts) for _ in some]
            if mine:
                self._apply(item, torch.stack(mine) if item.is_stack else mine[0], learning_rate)

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
