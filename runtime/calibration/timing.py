"""Timing of one operation on one device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

HEAD_START_WIDTH, HEAD_START_BYTES, HEAD_START_ROUNDS = 8192, 2**31, 80
"""A product of 8192 x 8192 and a pass over 2 GiB, in turns, as a training step mixes them: the clock
depends on how much of the time products take. About 0.2 s on an H200: the host issues twenty repeats of the
longest chain of kernels in less."""


@dataclass(frozen=True)
class Timing:
    """Median and relative spread of repeated runs."""

    seconds: float
    spread: float


def time_operation(
    run: Callable[[], object],
    device: torch.device,
    *,
    warmup: int = 3,
    repeats: int = 20,
    prepare: Callable[[], object] | None = None,
) -> Timing:
    """Time `run`; `prepare` runs untimed before each repeat.

    On CUDA each repeat lies between two events, behind products that keep the device busy until the host has
    issued them all: what is measured is the device's time, however slow the host, at the clock that the
    device keeps up while it trains.
    """
    for _ in range(warmup):
        if prepare:
            prepare()
        run()
    samples = (
        _cuda_samples(run, prepare, repeats)
        if device.type == "cuda"
        else _host_samples(run, prepare, repeats)
    )
    samples.sort()
    median = statistics.median(samples)
    low, high = samples[len(samples) // 10], samples[-1 - len(samples) // 10]
    return Timing(seconds=median, spread=(high - low) / median if median else 0.0)


def _cuda_samples(
    run: Callable[[], object], prepare: Callable[[], object] | None, repeats: int
) -> list[float]:
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    heat = torch.randn(HEAD_START_WIDTH, HEAD_START_WIDTH, device="cuda", dtype=torch.bfloat16)
    passed = torch.zeros(HEAD_START_BYTES, device="cuda", dtype=torch.uint8).view(torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(HEAD_START_ROUNDS):
        heat @ heat
        passed.neg_()
    for start, end in pairs:
        if prepare:
            prepare()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in pairs]


def _host_samples(
    run: Callable[[], object], prepare: Callable[[], object] | None, repeats: int
) -> list[float]:
    samples = []
    for _ in range(repeats):
        if prepare:
            prepare()
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return samples
