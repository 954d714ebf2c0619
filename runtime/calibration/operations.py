"""The single-device operations that are measured, each through the code that training runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shipway.runtime import kernels
from shipway.runtime.calibration.timing import time_operation
from shipway.schemas.measurement import Operation, Row


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


def _random(device: torch.device, dtype: torch.dtype, *shape: int, grad: bool = False) -> Tensor:
    # Random values, never zeros: a matrix product on zeros runs faster than on real data.
    tensor = torch.randn(shape, device=device, dtype=dtype) * 0.5
    return tensor.requires_grad_(grad)


def _row(
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


def _gemms(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for rows, inner, columns in sizes.gemms:
        x, w = _random(device, dtype, rows, inner), _random(device, dtype, columns, inner)
        yield _row(
            "gemm",
            lambda x=x, w=w: x @ w.T,
            device,
            sizes={"rows": rows, "inner": inner, "columns": columns},
            flops=2.0 * rows * inner * columns,
            nbytes=x.element_size() * (rows * inner + inner * columns + rows * columns),
        )


def _grouped(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for groups, rows, inner, columns in sizes.grouped:
        x = _random(device, dtype, groups * rows, inner, grad=True)
        w = _random(device, dtype, groups, columns, inner, grad=True)
        offsets = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * rows
        facts = {"groups": groups, "rows": rows, "inner": inner, "columns": columns}
        flops = 2.0 * groups * rows * inner * columns
        yield from _both_phases(
            "grouped_gemm",
            lambda x=x, w=w, o=offsets: kernels.grouped_mm(x, w, o),
            (x, w),
            device,
            facts,
            flops,
        )


def _attention(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for batch, tokens, heads, key_width, value_width in sizes.attention:
        q = _random(device, dtype, batch, tokens, heads, key_width, grad=True)
        k = _random(device, dtype, batch, tokens, heads, key_width, grad=True)
        v = _random(device, dtype, batch, tokens, heads, value_width, grad=True)
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

        yield from _both_phases("attention", run, (q, k, v), device, facts, flops)


def _delta(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for tokens, heads, width in sizes.delta:
        q, k, v, g = (_random(device, dtype, 1, tokens, heads, width, grad=True) for _ in range(4))
        beta = _random(device, dtype, 1, tokens, heads, grad=True)
        a_log = torch.zeros(heads, device=device)
        dt_bias = torch.zeros(heads * width, device=device)
        chunk = 64
        for bound in (-5.0, None):
            facts = {"tokens": tokens, "heads": heads, "key_width": width, "value_width": width}
            facts |= {"chunk": chunk, "bounded": int(bound is not None)}
            flops = float(tokens) * heads * (6 * width * width + 3 * chunk * width + chunk * chunk)

            def run(bound: float | None = bound) -> Tensor:
                return kernels.delta_rule(q, k, v, g, beta, a_log, dt_bias, lower_bound=bound, chunk=chunk)[0]  # noqa: B023

            yield from _both_phases("delta_rule", run, (q, k, v, g, beta), device, facts, flops)


def _both_phases(
    operation: Operation,
    forward: Callable[[], Tensor],
    leaves: tuple[Tensor, ...],
    device: torch.device,
    facts: dict[str, int],
    flops: float,
) -> Iterator[Row]:
    def run_forward() -> None:
        with torch.no_grad():
            forward()

    yield _row(operation, run_forward, device, sizes=facts, flops=flops)
    outputs: list[Tensor] = []
    gradient = torch.randn_like(forward())

    def run_backward() -> None:
        torch.autograd.grad(outputs.pop(), leaves, gradient)

    yield _row(
        operation,
        run_backward,
        device,
        sizes=facts,
        flops=2 * flops,
        phase="backward",
        prepare=lambda: outputs.append(forward()),
    )


def _documents(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    """Attention within packed documents of like length, causal."""
    for documents, tokens, heads, key_width, value_width in sizes.documents:
        q, k, v = (
            _random(device, dtype, 1, documents * tokens, heads, width, grad=True)
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

        yield from _both_phases("documents_attention", run, (q, k, v), device, facts, flops)


def _memory(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    for nbytes in sizes.copies:
        source = torch.empty(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        facts = {"bytes": nbytes}
        yield _row(
            "copy",
            lambda s=source, t=target: t.copy_(s),
            device,
            sizes=facts,
            nbytes=2.0 * nbytes,
        )
        if device.type == "cuda" and nbytes <= 1 << 30:
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            yield _row(
                "host_to_device",
                lambda h=host, t=target: t.copy_(h, non_blocking=True),
                device,
                sizes=facts,
                nbytes=nbytes,
            )
            yield _row(
                "device_to_host",
                lambda h=host, t=target: h.copy_(t, non_blocking=True),
                device,
                sizes=facts,
                nbytes=nbytes,
            )


def _elementwise(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    width = 2048
    for rows in sizes.elementwise:
        gate, up = _random(device, dtype, rows, width), _random(device, dtype, rows, width)
        weight = torch.ones(width, device=device, dtype=dtype)
        element = gate.element_size() * rows * width
        runs: dict[str, tuple[Callable[[], object], float]] = {
            "norm": (lambda g=gate, w=weight: kernels.rms_norm(g, w, 1e-5), 2.0),
            "situ_glu": (lambda g=gate, u=up: kernels.situ_glu(g, u, 4.0, 25.0), 3.0),
            "add": (lambda g=gate, u=up: torch.add(g, u), 3.0),
        }
        for name, (run, passes) in runs.items():
            facts = {"rows": rows, "width": width, name: 1}
            yield _row("elementwise", run, device, sizes=facts, nbytes=passes * element)


def _launch(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    x = torch.zeros(1, device=device)
    calls = 200

    def run() -> None:
        for _ in range(calls):
            x.add_(1)

    timing = time_operation(run, device, repeats=10)
    yield Row(operation="launch", sizes={"calls": 1}, seconds=timing.seconds / calls, spread=timing.spread)


FAMILIES: dict[str, Callable[[torch.device, Sizes, torch.dtype], Iterator[Row]]] = {
    "gemm": _gemms,
    "grouped_gemm": _grouped,
    "attention": _attention,
    "documents_attention": _documents,
    "delta_rule": _delta,
    "memory": _memory,
    "elementwise": _elementwise,
    "launch": _launch,
}
"""What measures each family of operations."""
