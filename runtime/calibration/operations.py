"""The single-device operations that are measured, each through the code that training runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shipway.runtime import kernels
from shipway.runtime.calibration.fp8 import measure_fp8
from shipway.runtime.calibration.rows import both_phases, random_tensor, timed_row
from shipway.runtime.calibration.timing import time_operation
from shipway.schemas.measurement import Row


@dataclass(frozen=True)
class Sizes:
    """What is measured; `quick` suits a CPU or a smoke test, `full` a data-centre GPU."""

    gemms: tuple[tuple[int, int, int], ...]
    """(rows, inner, columns)."""
    grouped: tuple[tuple[int, int, int, int], ...]
    """(groups, rows per group, inner, columns)."""
    attention: tuple[tuple[int, int, int, int, int], ...]
    """(batch, tokens, heads, key width, value width)."""
    documents: tuple[tuple[int, int, int, int, int], ...]
    """(documents, tokens of each, heads, key width, value width), packed."""
    delta: tuple[tuple[int, int, int], ...]
    """(tokens, heads, width)."""
    copies: tuple[int, ...]
    """Bytes."""
    elementwise: tuple[int, ...]
    """Rows of width 2048."""


FULL = Sizes(
    gemms=(
        *((rows, 4096, 4096) for rows in (512, 1024, 2048, 4096, 8192, 16384, 32768)),
        *((8192, inner, 2048) for inner in (256, 512, 1024, 2048, 5632)),
        *((8192, 2048, columns) for columns in (64, 128, 512, 1024, 2048, 5632, 8192)),
        (8192, 7168, 12288),
        (8192, 12288, 7168),
        (8192, 7168, 1536),
        (8192, 512, 24576),
        (2048, 2048, 32768),
        (2048, 7168, 163840),
        (8192, 8192, 8192),
    ),
    grouped=(
        *((56, rows, 3584, 3072) for rows in (16, 64, 128, 256, 512, 1024)),
        *((64, rows, 1024, 1024) for rows in (64, 256, 1024)),
        (64, 512, 2048, 768),
        (8, 4096, 4096, 14336),
        (128, 256, 2048, 768),
    ),
    attention=(
        *((1, tokens, 16, 192, 128) for tokens in (2048, 4096, 8192, 16384, 32768)),
        *((1, tokens, 16, 128, 128) for tokens in (2048, 4096, 8192, 32768)),
        (4, 8192, 16, 192, 128),
        (8, 2048, 16, 128, 128),
        (1, 8192, 96, 192, 128),
    ),
    documents=(
        (1, 8192, 16, 192, 128),
        (4, 8192, 16, 192, 128),
        (16, 1024, 16, 192, 128),
        (1, 32768, 16, 192, 128),
        (2, 8192, 16, 128, 128),
    ),
    delta=(
        *((tokens, 16, 128) for tokens in (4096, 8192, 32768, 131072)),
        (8192, 32, 128),
        (8192, 96, 128),
        (65536, 32, 128),
    ),
    copies=tuple(1 << bits for bits in range(16, 33, 2)),
    elementwise=(256, 2048, 16384, 65536),
)
QUICK = Sizes(
    gemms=((256, 256, 256), (512, 512, 512), (1024, 512, 512)),
    grouped=((8, 64, 128, 128), (16, 32, 128, 128)),
    attention=((2, 256, 4, 48, 32), (2, 512, 4, 48, 32)),
    documents=((2, 256, 4, 48, 32), (4, 128, 4, 48, 32)),
    delta=((512, 4, 32), (1024, 4, 32)),
    copies=tuple(1 << bits for bits in range(16, 25, 4)),
    elementwise=(64, 512),
)


def _gemms(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for rows, inner, columns in sizes.gemms:
        x, w = random_tensor(device, dtype, rows, inner), random_tensor(device, dtype, columns, inner)
        yield timed_row(
            "gemm",
            lambda x=x, w=w: x @ w.T,
            device,
            sizes={"rows": rows, "inner": inner, "columns": columns},
            flops=2.0 * rows * inner * columns,
            nbytes=x.element_size() * (rows * inner + inner * columns + rows * columns),
        )


def _grouped(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for groups, rows, inner, columns in sizes.grouped:
        x = random_tensor(device, dtype, groups * rows, inner, grad=True)
        w = random_tensor(device, dtype, groups, columns, inner, grad=True)
        offsets = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * rows
        facts = {"groups": groups, "rows": rows, "inner": inner, "columns": columns}
        flops = 2.0 * groups * rows * inner * columns
        yield from both_phases(
            "grouped_gemm",
            lambda x=x, w=w, o=offsets: kernels.grouped_mm(x, w, o, whole=True),
            (x, w),
            device,
            facts,
            flops,
        )


def _attention(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for batch, tokens, heads, key_width, value_width in sizes.attention:
        q = random_tensor(device, dtype, batch, tokens, heads, key_width, grad=True)
        k = random_tensor(device, dtype, batch, tokens, heads, key_width, grad=True)
        v = random_tensor(device, dtype, batch, tokens, heads, value_width, grad=True)
        facts = {
            "batch": batch,
            "tokens": tokens,
            "heads": heads,
            "key_width": key_width,
            "value_width": value_width,
        }
        flops = float(batch) * heads * tokens * tokens * (key_width + value_width)

        def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, scale: float = key_width**-0.5) -> Tensor:
            return kernels.softmax_attention(q, k, v, scale=scale)

        yield from both_phases("attention", run, (q, k, v), device, facts, flops)


def _delta(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for tokens, heads, width in sizes.delta:
        q, k, v, g = (random_tensor(device, dtype, 1, tokens, heads, width, grad=True) for _ in range(4))
        beta = random_tensor(device, dtype, 1, tokens, heads, grad=True)
        a_log = torch.zeros(heads, device=device)
        dt_bias = torch.zeros(heads * width, device=device)
        chunk = 64
        for bound in (-5.0, None):
            facts = {"tokens": tokens, "heads": heads, "key_width": width, "value_width": width}
            facts |= {"chunk": chunk, "bounded": int(bound is not None)}
            flops = float(tokens) * heads * (6 * width * width + 3 * chunk * width + chunk * chunk)

            def run(bound: float | None = bound) -> Tensor:
                return kernels.delta_rule(q, k, v, g, beta, a_log, dt_bias, lower_bound=bound, chunk=chunk)[0]  # noqa: B023

            yield from both_phases("delta_rule", run, (q, k, v, g, beta), device, facts, flops)


def _documents(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    """Attention within packed documents of like length, causal."""
    for documents, tokens, heads, key_width, value_width in sizes.documents:
        q, k, v = (
            random_tensor(device, dtype, 1, documents * tokens, heads, width, grad=True)
            for width in (key_width, key_width, value_width)
        )
        bounds = torch.arange(documents + 1, device=device, dtype=torch.int32) * tokens
        facts = {
            "batch": documents,
            "tokens": tokens,
            "heads": heads,
            "key_width": key_width,
            "value_width": value_width,
        }
        flops = float(documents) * heads * tokens * tokens * (key_width + value_width)

        def run(
            q: Tensor = q,
            k: Tensor = k,
            v: Tensor = v,
            bounds: Tensor = bounds,
            scale: float = key_width**-0.5,
        ) -> Tensor:
            return kernels.softmax_attention(q, k, v, scale=scale, cu_seqlens=bounds)

        yield from both_phases("documents_attention", run, (q, k, v), device, facts, flops)


def _memory(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for nbytes in sizes.copies:
        source = torch.empty(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        facts = {"bytes": nbytes}
        yield timed_row(
            "copy",
            lambda s=source, t=target: t.copy_(s),
            device,
            sizes=facts,
            nbytes=2.0 * nbytes,
        )
        if device.type == "cuda" and nbytes <= 1 << 30:
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            yield timed_row(
                "host_to_device",
                lambda h=host, t=target: t.copy_(h, non_blocking=True),
                device,
                sizes=facts,
                nbytes=nbytes,
            )
            yield timed_row(
                "device_to_host",
                lambda h=host, t=target: h.copy_(t, non_blocking=True),
                device,
                sizes=facts,
                nbytes=nbytes,
            )


def _elementwise(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    width = 2048
    for rows in sizes.elementwise:
        gate, up = random_tensor(device, dtype, rows, width), random_tensor(device, dtype, rows, width)
        weight = torch.ones(width, device=device, dtype=dtype)
        element = gate.element_size() * rows * width
        runs: dict[str, tuple[Callable[[], object], float]] = {
            "norm": (lambda g=gate, w=weight: kernels.rms_norm(g, w, 1e-5), 2.0),
            "situ_glu": (lambda g=gate, u=up: kernels.situ_glu(g, u, 4.0, 25.0), 3.0),
            "add": (lambda g=gate, u=up: torch.add(g, u), 3.0),
        }
        for name, (run, passes) in runs.items():
            facts = {"rows": rows, "width": width, name: 1}
            yield timed_row("elementwise", run, device, sizes=facts, nbytes=passes * element)


def _launch(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    x = torch.zeros(1, device=device)
    calls = 200

    def run() -> None:
        for _ in range(calls):
            x.add_(1)

    timing = time_operation(run, torch.device("cpu"), repeats=10)  # how fast the host issues them
    yield Row(operation="launch", sizes={"calls": 1}, seconds=timing.seconds / calls, spread=timing.spread)


FAMILIES: dict[str, Callable[[torch.device, Sizes, torch.dtype], Iterator[Row]]] = {
    "gemm": _gemms,
    "grouped_gemm": _grouped,
    "attention": _attention,
    "fp8": lambda device, sizes, dtype: measure_fp8(device, sizes.gemms),
    "documents_attention": _documents,
    "delta_rule": _delta,
    "memory": _memory,
    "elementwise": _elementwise,
    "launch": _launch,
}
"""What measures each family of operations."""
