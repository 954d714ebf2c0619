"""Pictures under tensor and context parallel: every rank encodes a share of them.

All ranks of tp x cp are given all pictures of their rows. Each runs the vision tower on some, whole ones, so
that all have about as many patches; the embeddings are gathered over both axes, and a rank takes those that
its tokens stand for. What a picture's patches cost is thus paid once, and as every embedding stands in one
place of one rank, gathering's backward brings each its gradient and adds nothing up. The gradients of the
tower's parameters are parts of sums over both axes, which tensor parallel and FSDP take anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.rows import Rows


def apply_picture_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Share pictures over tp and cp, in place; a pipeline stage after the first has no tower."""
    vision = getattr(model, "vision", None)
    axes = [Rows(mesh.group(name)) for name in ("tp", "cp") if mesh.size(name) > 1]
    if vision is None or not axes:
        return
    # Replacing methods, not modules, keeps every parameter's name.
    vision.forward = partial(encode_share, vision, axes)
    if mesh.size("tp") > 1:
        model.with_images = partial(place_in_shard, model, mesh.group("tp"))


def encode_share(
    vision: nn.Module, axes: Sequence[Rows], patches: Tensor, grids: Tensor, index: Tensor | None = None
) -> Tensor:
    """Embeddings [image tokens, D] of all pictures, or of those tokens that `index` [m] names.

    `patches` and `grids` as the generated VisionTower takes them; `axes` innermost first.
    """
    merge: int = type(vision).forward.__globals__["MERGE"]  # of the generated module
    sizes = [rows * columns for rows, columns in grids.tolist()]
    rank, ranks = 0, 1
    for axis in axes:
        rank, ranks = rank + axis.rank * ranks, ranks * axis.ranks
    shares = share_out(sizes, ranks)
    tokens = [sum(sizes[i] for i in share) // merge**2 for share in shares]

    mine, parts = shares[rank], patches.split(sizes)
    if mine:
        seen = type(vision).forward(vision, torch.cat([parts[i] for i in mine]), grids[list(mine)])
    else:  # a blank of one token, of which nothing is taken: FSDP waits for the tower's gradients
        blank = patches.new_zeros(merge**2, patches.shape[1])
        seen = type(vision).forward(vision, blank, grids.new_full((1, 2), merge))[:0]
    longest = max(tokens)
    seen = F.pad(seen, (0, 0, 0, longest - tokens[rank]))
    for axis in axes:
        seen = axis.all(seen).flatten(0, 1)  # [ranks * longest, D] in the end
    order = _order(sizes, shares, longest, merge**2).to(seen.device)
    return seen[order if index is None else order[index]]


def share_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of the pictures that each rank encodes: the largest first, to who has least (Graham, 1969)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for picture in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        shares[least].append(picture)
        loads[least] += sizes[picture]
    return [sorted(share) for share in shares]


def _order(sizes: Sequence[int], shares: Sequence[Sequence[int]], longest: int, merged: int) -> Tensor:
    """Where each embedding, in the order of pictures, stands in what was gathered."""
    rows: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(sizes)
    for rank, share in enumerate(shares):
        first = rank * longest
        for picture in share:
            count = sizes[picture] // merged
            rows[picture] = torch.arange(first, first + count)
            first += count
    return torch.cat(rows)


def place_in_shard(
    model: nn.Module, group: dist.ProcessGroup, x: Tensor, tokens: Tensor, seen: Tensor
) -> Tensor:
    """The model's `with_images` for this rank's tokens x [B, T / tp, D] of tokens [B, T]."""
    token: int = type(model).forward.__globals__["IMAGE_TOKEN"]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    is_image = tokens == token
    number = (is_image.flatten().cumsum(0) - 1).view_as(tokens)
    mine, shard = (y.chunk(ranks, 1)[rank] for y in (number, tokens))
    placed: Tensor = type(model).with_images(model, x, shard, seen[mine[shard == token]])
    return placed
