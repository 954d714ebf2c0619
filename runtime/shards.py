"""Which block of the whole tensor each rank holds of a sharded parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class Block:
    """A box of a tensor: `offset` and `size` along each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.size, strict=True))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's own part: the tensor itself when it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_axes(tensor: Tensor) -> tuple[int, ...]:
    """Mesh dimensions that a tensor is sharded over (size-1 dimensions left out)."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(
        axis
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard | _StridedShard) and tensor.device_mesh.size(axis) > 1
    )


def block_of(tensor: Tensor, coordinate: tuple[int, ...] | None = None) -> Block:
    """The block that the rank at `coordinate` of the tensor's mesh holds (by default this rank).

    Sharding splits as torch.chunk does. Where FSDP shards what tensor parallel has already split
    along the same dimension, the placement is strided and FSDP's split comes second.
    """
    offset, size = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        where = coordinate or mesh.get_coordinate()
        if where is None:
            raise ValueError("this rank holds no part of the tensor")
        axes = sharded_axes(tensor)
        # A strided placement is one whose split is applied after those of the inner mesh dimensions.
        for axis in sorted(axes, key=lambda a: (type(tensor.placements[a]) is not Shard, a)):
            dimension = tensor.placements[axis].dim  # type: ignore[attr-defined]
            chunk = -(-size[dimension] // mesh.size(axis))
            start = min(chunk * where[axis], size[dimension])
            offset[dimension] += start
            size[dimension] = min(chunk, size[dimension] - start)
    return Block(tuple(offset), tuple(size))


def like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros sharded as `parameter` is."""
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
