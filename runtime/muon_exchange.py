"""Bringing whole matrices together from the blocks that ranks hold, and sending blocks of them back.

Each matrix has one owner, chosen to even out the work. Every rank sends the owner its block; the owner
sends each rank its block of the result. Nothing is gathered by everyone. Where replicas hold the same blocks,
each of them does its share of the matrices, and they send each other what they made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shipway.runtime.shards import Block


@dataclass(frozen=True)
class Piece:
    """One matrix that a group of ranks holds in blocks."""

    shape: tuple[int, ...]
    """Of the whole."""
    blocks: tuple[Block, ...]
    """By rank of the group."""
    part: Tensor
    """This rank's block."""
    work: float
    """Cost of orthogonalising it, in any unit."""


def assign_owners(work: Sequence[float], ranks: int) -> list[int]:
    """Owner of each matrix: heaviest first to the rank with the least work; the same on every rank."""
    load = [0.0] * ranks
    owners = [0] * len(work)
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        owner = min(range(ranks), key=lambda r: (load[r], r))
        owners[index] = owner
        load[owner] += work[index]
    return owners


def gather_to_owners(
    pieces: Sequence[Piece], owners: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor | None]:
    """Whole matrices at their owners, None elsewhere."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    sent: list[list[Tensor]] = [[] for _ in range(ranks)]
    for piece, owner in zip(pieces, owners, strict=True):
        sent[owner].append(piece.part)
    mine = [i for i, owner in enumerate(owners) if owner == me]
    counts = [sum(math.prod(pieces[i].blocks[r].size) for i in mine) for r in range(ranks)]
    received = exchange(sent, counts, group, pieces[0].part.device)
    wholes: list[Tensor | None] = [None] * len(pieces)
    for i in mine:
        wholes[i] = torch.empty(pieces[i].shape, dtype=torch.float32, device=pieces[i].part.device)
    for r in range(ranks):
        at = 0
        for i in mine:
            block, whole = pieces[i].blocks[r], wholes[i]
            assert whole is not None
            count = math.prod(block.size)
            whole[block.slices] = received[r][at : at + count].view(block.size)
            at += count
    return wholes


def scatter_from_owners(
    pieces: Sequence[Piece],
    wholes: Sequence[Tensor | None],
    owners: Sequence[int],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """This rank's block of every matrix, from whole matrices at their owners."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    sent = [
        [whole[pieces[i].blocks[r].slices] for i, whole in enumerate(wholes) if whole is not None]
        for r in range(ranks)
    ]
    of_owner = [[i for i, owner in enumerate(owners) if owner == r] for r in range(ranks)]
    counts = [sum(math.prod(pieces[i].blocks[me].size) for i in indices) for indices in of_owner]
    received = exchange(sent, counts, group, pieces[0].part.device)
    result: list[Tensor] = [torch.empty(0)] * len(pieces)
    for r, indices in enumerate(of_owner):
        at = 0
        for i in indices:
            size = pieces[i].blocks[me].size
            result[i] = received[r][at : at + math.prod(size)].view(size)
            at += math.prod(size)
    return result


def share_with_copies(
    made: Sequence[Tensor], like: Sequence[Tensor], owners: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """All blocks, shaped as `like`, from those that this rank `made`, which it owns: every rank gets all."""
    ranks = dist.get_world_size(group)
    of_owner = [[i for i, owner in enumerate(owners) if owner == r] for r in range(ranks)]
    counts = [sum(like[i].numel() for i in indices) for indices in of_owner]
    received = exchange([list(made)] * ranks, counts, group, like[0].device)
    result: list[Tensor] = [torch.empty(0)] * len(like)
    for indices, values in zip(of_owner, received, strict=True):
        parts = values.split([like[i].numel() for i in indices])
        for i, part in zip(indices, parts, strict=True):
            result[i] = part.view_as(like[i])
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


def copies_of(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Groups of ranks that hold the same block of a parameter, by the axes of its mesh."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    )


def group_over(parameter: DTensor, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """The ranks that differ from this one along `axes` of a parameter's mesh alone."""
    mesh = parameter.device_mesh
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[tuple(names[axis] for axis in axes)]._flatten().get_group()


def coordinates_over(parameter: DTensor, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Mesh coordinates of those ranks, in the group's order."""
    mesh = parameter.device_mesh
    here = mesh.get_coordinate()
    assert here is not None
    coordinates = [tuple(here)]
    for axis in axes:
        coordinates = [(*c[:axis], i, *c[axis + 1 :]) for c in coordinates for i in range(mesh.size(axis))]
    return coordinates
