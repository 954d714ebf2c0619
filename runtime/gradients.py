"""The global gradient norm, whatever mesh each parameter is sharded over, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shipway.runtime.mesh import Mesh
from shipway.runtime.shards import local_tensor, sharded_axes


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """L2 norm over the whole model, fp32 scalar, the same on every rank.

    Squares are summed once per copy: over the axes that a parameter is sharded over, never over
    those it is replicated on, then over pipeline stages.
    """
    squares: dict[tuple[object, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            key = (getattr(parameter, "device_mesh", None), sharded_axes(parameter))
            squares[key].append(local_tensor(parameter.grad))
    total = torch.zeros((), device=mesh.device)
    for gradients, (device_mesh, axes) in ((g, k) for k, g in sorted_groups(squares)):
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        square = torch.stack(norms).square().sum()
        for axis in axes:
            dist.all_reduce(square, group=device_mesh.get_group(axis))  # type: ignore[attr-defined]
        total += square
    return mesh.all_reduce(total, ["pp"]).sqrt()


def sorted_groups(
    squares: dict[tuple[object, tuple[int, ...]], list[Tensor]],
) -> list[tuple[tuple[object, tuple[int, ...]], list[Tensor]]]:
    """Groups in an order that every rank agrees on, since each group may mean a collective."""

    def order(key: tuple[object, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
        mesh = key[0]
        return (str(mesh.mesh_dim_names) if hasattr(mesh, "mesh_dim_names") else "", key[1])

    return sorted(squares.items(), key=lambda item: order(item[0]))


@torch.no_grad()
def clip(parameters: Iterable[Tensor], norm: float, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`."""
    factor = limit / (norm + 1e-6)
    if factor >= 1:
        return
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, factor)


def zero_missing(parameters: Iterable[Tensor]) -> None:
    """Give parameters that no token reached a zero gradient, so that all ranks hold the same set."""
    for parameter in parameters:
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = (
                torch.zeros_like(parameter)
                if not isinstance(parameter, DTensor)
                else torch.zeros_like(parameter, requires_grad=False)
            )
