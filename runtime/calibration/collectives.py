"""Collectives by kind, size and group, through the process groups that training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from shipway.runtime.calibration.timing import time_operation
from shipway.schemas.measurement import Operation, Row


def group_sizes(world: int) -> tuple[int, ...]:
    """Powers of two up to the world, and the world itself."""
    sizes = [1 << bits for bits in range(1, world.bit_length()) if 1 << bits <= world]
    return tuple(sorted({*sizes, world} - {1}))


def measure_collectives(device: torch.device, sizes_bytes: tuple[int, ...]) -> Iterator[Row]:
    """Rows for every kind, group and size; every rank iterates all, ranks outside a group wait."""
    world = dist.get_world_size()
    for members in group_sizes(world):
        group = dist.new_group(list(range(members)))
        for nbytes in sizes_bytes:
            if dist.get_rank() < members:
                yield from _one_size(device, group, members, nbytes)
            dist.barrier()


def _one_size(device: torch.device, group: dist.ProcessGroup, members: int, nbytes: int) -> Iterator[Row]:
    elements = max(nbytes // 2 // members, 1) * members
    whole = torch.randn(elements, device=device).to(torch.bfloat16)
    shard = whole[: elements // members].clone()
    received = torch.empty_like(whole)
    rank = dist.get_rank(group)
    runs: dict[Operation, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
        "send_receive": lambda: _exchange(whole, received, rank, members, group),
    }
    for operation, run in runs.items():
        timing = time_operation(run, device, warmup=5, repeats=20)
        yield Row(
            operation=operation,
            sizes={"group": members, "bytes": whole.numel() * 2},
            bytes=float(whole.numel() * 2),
            seconds=timing.seconds,
            spread=timing.spread,
        )


def _exchange(
    whole: torch.Tensor, received: torch.Tensor, rank: int, members: int, group: dist.ProcessGroup
) -> None:
    to = dist.get_global_rank(group, (rank + 1) % members)
    source = dist.get_global_rank(group, (rank - 1) % members)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, whole, to, group=group),
            dist.P2POp(dist.irecv, received, source, group=group),
        ]
    ):
        work.wait()
