"""Rows of measured operations: one run timed, or a forward and a backward apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from shipway.runtime.calibration.timing import time_operation
from shipway.schemas.measurement import Operation, Row


def random_tensor(device: torch.device, dtype: torch.dtype, *shape: int, grad: bool = False) -> Tensor:
    """Random values: a matrix product on zeros runs faster than on real data."""
    tensor = torch.randn(shape, device=device, dtype=dtype) * 0.5
    return tensor.requires_grad_(grad)


def timed_row(
    operation: Operation,
    run: Callable[[], object],
    device: torch.device,
    *,
    sizes: dict[str, int],
    flops: float = 0.0,
    nbytes: float = 0.0,
    phase: Literal["forward", "backward"] = "forward",
    prepare: Callable[[], object] | None = None,
) -> Row:
    """The median of repeated runs; `prepare` goes untimed before each."""
    timing = time_operation(run, device, prepare=prepare)
    return Row(
        operation=operation,
        phase=phase,
        sizes=sizes,
        flops=flops,
        bytes=nbytes,
        seconds=timing.seconds,
        spread=timing.spread,
    )


def both_phases(
    operation: Operation,
    forward: Callable[[], Tensor],
    leaves: tuple[Tensor, ...],
    device: torch.device,
    facts: dict[str, int],
    flops: float,
) -> Iterator[Row]:
    """`flops` of forward, and twice as many of backward, which starts from a fresh graph each time."""

    def run_forward() -> None:
        with torch.no_grad():
            forward()

    yield timed_row(operation, run_forward, device, sizes=facts, flops=flops)
    outputs: list[Tensor] = []
    gradient = torch.randn_like(forward())

    def run_backward() -> None:
        torch.autograd.grad(outputs.pop(), leaves, gradient)

    yield timed_row(
        operation,
        run_backward,
        device,
        sizes=facts,
        flops=2 * flops,
        phase="backward",
        prepare=lambda: outputs.append(forward()),
    )
