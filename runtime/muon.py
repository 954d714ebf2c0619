"""Muon on parameters that FSDP and tensor parallel have sharded (arXiv 2502.16982; per head as Kimi K3).

Orthogonalisation needs whole matrices. A rank whose block consists of whole units (heads, experts,
or everything) works on its own. Otherwise the ranks of a shard group exchange: each matrix has one
owner, chosen to even out the work; every rank sends the owner its block of the momentum, the owner
orthogonalises and sends each rank its block of the update back. Nothing is gathered by everyone.
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

from shipway.runtime.newton_schulz import orthogonalise
from shipway.runtime.shards import Block, block_of, like, local_tensor, sharded_axes

ROUND_BYTES = 512 * 2**20
"""Whole matrices in flight in one exchange over a shard group, so that scratch stays bounded."""


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
    """One parameter: `units` row blocks of a matrix, or the slices of a stack of matrices."""

    name: str
    parameter: Tensor
    heads: int = 1
    """Row blocks orthogonalised apart; a three-dimensional parameter is always taken slice by slice."""

    def units(self, whole: Tensor) -> Tensor:
        """View rows [k rows, columns] of the parameter (any number of whole units) as [k, rows, columns]."""
        if whole.ndim == 3:
            return whole
        return whole.view(-1, self.unit_rows, whole.shape[-1])

    @property
    def unit_rows(self) -> int:
        """Rows of one unit along dimension 0 (1 slice of a stack)."""
        shape = self.parameter.shape
        return 1 if len(shape) == 3 else shape[0] // self.heads

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one orthogonalised matrix."""
        shape = self.parameter.shape
        return (shape[-2], shape[-1]) if len(shape) == 3 else (self.unit_rows, shape[1])

    def is_whole(self, block: Block) -> bool:
        """Whether a block consists of whole units."""
        shape = self.parameter.shape
        return (
            block.size[1:] == tuple(shape[1:])
            and block.offset[0] % self.unit_rows == 0
            and block.size[0] % self.unit_rows == 0
        )

    @property
    def work(self) -> float:
        """Multiply-adds of one Newton-Schulz step over the whole parameter, to even out owners."""
        rows, columns = self.matrix
        small, large = min(rows, columns), max(rows, columns)
        return self.parameter.numel() / (rows * columns) * (2 * small**2 * large + small**3)


@dataclass
class Muon:
    """Momentum, Nesterov, Newton-Schulz, decoupled decay: W <- (1 - lr wd) W - lr rms sqrt(max(n, m)) O."""

    parameters: Sequence[MuonParameter]
    options: MuonOptions
    momentum: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.momentum = {p.name: like(p.parameter, self.options.momentum_dtype) for p in self.parameters}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter from its gradient; all ranks of a shard group must call it together."""
        alone, together = self._split_by_reach()
        for item in alone:
            direction = self._direction(item)
            if direction.numel():
                self._apply(item, self._orthogonal(item, direction), learning_rate)
        for items in together:
            self._step_together(items, learning_rate)

    def _split_by_reach(self) -> tuple[list[MuonParameter], list[list[MuonParameter]]]:
        """Parameters every rank can do alone, and the others by the mesh they are sharded over."""
        alone: list[MuonParameter] = []
        together: dict[object, list[MuonParameter]] = defaultdict(list)
        for item in self.parameters:
            coordinates = shard_coordinates(item.parameter)
            if all(item.is_whole(block_of(item.parameter, c)) for c in coordinates):
                alone.append(item)
            else:
                parameter = item.parameter
                assert isinstance(parameter, DTensor)
                together[(parameter.device_mesh, sharded_axes(parameter))].append(item)
        return alone, list(together.values())

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

    def _orthogonal(self, item: MuonParameter, rows: Tensor) -> Tensor:
        units = orthogonalise(item.units(rows), self.options.steps, self.options.product_dtype)
        return units.reshape(rows.shape)

    def _apply(self, item: MuonParameter, update: Tensor, learning_rate: float) -> None:
        scale = self.options.update_rms * math.sqrt(max(item.matrix))
        local = local_tensor(item.parameter)
        local.mul_(1 - learning_rate * self.options.weight_decay)
        local.add_(update.to(local.dtype), alpha=-learning_rate * scale)

    def _step_together(self, items: list[MuonParameter], learning_rate: float) -> None:
        parameter = items[0].parameter
        assert isinstance(parameter, DTensor)
        group = shard_group(parameter)
        for round_items in rounds(items, dist.get_world_size(group)):
            owners = assign_owners(round_items, dist.get_world_size(group))
            wholes = gather_to_owners(
                [(item.parameter, self._direction(item)) for item in round_items], owners, group
            )
            updates = [
                None if whole is None else self._orthogonal(item, whole)
                for item, whole in zip(round_items, wholes, strict=True)
            ]
            blocks = scatter_from_owners([i.parameter for i in round_items], updates, owners, group)
            for item, block in zip(round_items, blocks, strict=True):
                self._apply(item, block, learning_rate)


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


def assign_owners(items: Sequence[MuonParameter], ranks: int) -> list[int]:
    """Owner of each matrix: heaviest first to the rank with the least work; the same on every rank."""
    load = [0.0] * ranks
    owners = [0] * len(items)
    for index in sorted(range(len(items)), key=lambda i: (-items[i].work, i)):
        owner = min(range(ranks), key=lambda r: (load[r], r))
        owners[index] = owner
        load[owner] += items[index].work
    return owners


def shard_coordinates(parameter: Tensor) -> list[tuple[int, ...]]:
    """Mesh coordinates of the ranks that together hold one copy of `parameter`, in shard-group order."""
    if not isinstance(parameter, DTensor):
        return [()]
    mesh = parameter.device_mesh
    here = mesh.get_coordinate()
    assert here is not None
    coordinates = [tuple(here)]
    for axis in sharded_axes(parameter):
        coordinates = [(*c[:axis], i, *c[axis + 1 :]) for c in coordinates for i in range(mesh.size(axis))]
    return coordinates


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """The process group of the ranks that hold one copy of `parameter`."""
    mesh, axes = parameter.device_mesh, sharded_axes(parameter)
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[tuple(names[a] for a in axes)]._flatten().get_group()


def gather_to_owners(
    parts: Sequence[tuple[Tensor, Tensor]], owners: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor | None]:
    """Whole tensors at their owners, None elsewhere, from (sharded parameter, this rank's block) pairs."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    blocks = [[block_of(p, c) for c in shard_coordinates(p)] for p, _ in parts]
    sent = [
        [part for (_, part), owner in zip(parts, owners, strict=True) if owner == r] for r in range(ranks)
    ]
    mine = [i for i, owner in enumerate(owners) if owner == me]
    counts = [sum(math.prod(blocks[i][r].size) for i in mine) for r in range(ranks)]
    received = exchange(sent, counts, group, parts[0][1].device)
    wholes: list[Tensor | None] = [None] * len(parts)
    for i in mine:
        parameter, part = parts[i]
        wholes[i] = torch.empty(parameter.shape, dtype=part.dtype, device=part.device)
    for r in range(ranks):
        at = 0
        for i in mine:
            block, whole = blocks[i][r], wholes[i]
            assert whole is not None
            count = math.prod(block.size)
            whole[block.slices] = received[r][at : at + count].view(block.size)
            at += count
    return wholes


def scatter_from_owners(
    parameters: Sequence[Tensor],
    wholes: Sequence[Tensor | None],
    owners: Sequence[int],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """This rank's block of every tensor, from whole tensors at their owners."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    blocks = [[block_of(p, c) for c in shard_coordinates(p)] for p in parameters]
    sent = [
        [whole[blocks[i][r].slices] for i, whole in enumerate(wholes) if whole is not None]
        for r in range(ranks)
    ]
    of_owner = [[i for i, owner in enumerate(owners) if owner == r] for r in range(ranks)]
    counts = [sum(math.prod(blocks[i][me].size) for i in indices) for indices in of_owner]
    received = exchange(sent, counts, group, local_tensor(parameters[0]).device)
    result: list[Tensor] = [torch.empty(0)] * len(parameters)
    for r, indices in enumerate(of_owner):
        at = 0
        for i in indices:
            count = math.prod(blocks[i][me].size)
            result[i] = received[r][at : at + count].view(blocks[i][me].size)
            at += count
    return result


def exchange(
    sent: list[list[Tensor]], counts: list[int], group: dist.ProcessGroup, device: torch.device
) -> list[Tensor]:
    """All-to-all of fp32 values: `sent[r]` goes to rank r, `counts[r]` values come from it."""
    sizes = [sum(t.numel() for t in tensors) for tensors in sent]
    parts = [t.reshape(-1) for tensors in sent for t in tensors]
    outgoing = torch.cat(parts) if parts else torch.empty(0, device=device)
    incoming = torch.empty(sum(counts), dtype=torch.float32, device=device)
    dist.all_to_all_single(incoming, outgoing, counts, sizes, group=group)
    return list(incoming.split(counts))
