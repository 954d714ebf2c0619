"""Which of the plan's categories of compute a CUDA kernel belongs to, told by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shipway.runtime.profiling import communication_seconds

_CATEGORIES = (
    # fla-core's delta-attention kernels, inside which small products are part of the work
    (
        "delta attention",
        r"kda|delta_rule|chunk_gla|local_cumsum|l2norm|recompute_w_u|solve_tril|merge_16x16",
    ),
    ("attention", r"flash|fmha|sdpa|cudnn.*(attn|mha)|flex_attention|attention_(fwd|bwd|forward|backward)"),
    ("expert products", r"grouped|GroupProblem|group_gemm|GemmUniversal.*Group"),
    ("matrix products", r"gemm|nvjet|cutlass.*(Gemm|tensorop)|matmul|splitK|gemv|cublas"),
)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _CATEGORIES)
MEMORY_BOUND = "memory-bound work"
IDLE = "idle"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MICROSECOND = 1e-6
SLOWEST, NAME_LENGTH = 30, 160


@dataclass(frozen=True)
class KernelTimes:
    """What one rank's device did over a span of time."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By category of compute, and IDLE: when no kernel ran, collectives included."""
    communication: dict[str, float] = field(default_factory=dict)
    """By mesh axis."""
    count: int = 0
    slowest: dict[str, float] = field(default_factory=dict)
    """Seconds by kernel, the longest first."""


def category(kernel: str) -> str:
    """The category of compute of a kernel; what nothing else claims is memory-bound work."""
    return next((name for name, pattern in _PATTERNS if pattern.search(kernel)), MEMORY_BOUND)


def kernel_times(events: Iterable[Mapping[str, Any]]) -> KernelTimes:
    """Sum a trace's kernels (Trace Event Format); collectives are told apart by their axis."""
    events = list(events)
    spans = [
        e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    seconds: dict[str, float] = {}
    for event in spans:
        if not event["name"].startswith("nccl"):
            name = category(event["name"]) if event["cat"] == "kernel" else MEMORY_BOUND
            seconds[name] = seconds.get(name, 0.0) + event["dur"] * MICROSECOND
    if spans:
        seconds[IDLE] = _idle_microseconds(spans) * MICROSECOND
    return KernelTimes(seconds, communication_seconds(events), len(spans), _slowest(spans))


def _slowest(spans: list[Mapping[str, Any]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for event in spans:
        name = event["name"][:NAME_LENGTH]
        seconds[name] = seconds.get(name, 0.0) + event["dur"] * MICROSECOND
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST])


def _idle_microseconds(spans: list[Mapping[str, Any]]) -> float:
    """Between the first kernel's start and the last one's end, while none ran on any stream."""
    idle, reached = 0.0, float("inf")
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in spans):
        idle += max(0.0, start - reached)
        reached = end if reached == float("inf") else max(reached, end)
    return idle
