"""Products in fp8 and the rounding around them, as torchao's float8 linears do them by row.

Three kinds of rows: `fp8_gemm`, a product of operands that are rounded already, as forward takes it (scales
per row, fast accumulation) and as backward does (one scale, exact accumulation); `fp8_cast`, the compiled
rounding of one operand along memory or across it; and `fp8_linear`, a compiled linear module from end to
end, which a plan's sum of the other two is held against.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from shipway.runtime.calibration.rows import both_phases, random_tensor, timed_row
from shipway.runtime.parallel.float8 import apply_float8, multiplies_fp8
from shipway.schemas.measurement import Row

E4M3 = torch.float8_e4m3fn
NARROWEST, WIDEST = 1024, 65536
"""Products outside are none of a projection's."""
LINEARS = ((8192, 2048, 2048), (8192, 4096, 4096), (16384, 4096, 14336), (8192, 8192, 8192))
"""(rows, inner, columns) of compiled modules and, their inputs, of casts: each takes seconds to compile."""
ALONG_BYTES, ACROSS_BYTES = 3, 5
"""Bytes an element of a cast, as the operator catalogue counts them."""


def measure_fp8(device: torch.device, gemms: tuple[tuple[int, int, int], ...]) -> Iterator[Row]:
    """Rows of these products (rows, inner, columns) and of LINEARS; none where the device has no fp8."""
    if not multiplies_fp8(device):
        return
    for rows, inner, columns in gemms:
        if min(inner, columns) >= NARROWEST and columns <= WIDEST:
            yield from _gemm(device, rows, inner, columns)
    for rows, inner, _ in LINEARS:
        yield from _casts(device, rows, inner)
    if find_spec("torchao") is not None:
        for rows, inner, columns in LINEARS:
            yield from _linear(device, rows, inner, columns)


def _gemm(device: torch.device, rows: int, inner: int, columns: int) -> Iterator[Row]:
    x = random_tensor(device, torch.bfloat16, rows, inner).to(E4M3)
    w = random_tensor(device, torch.bfloat16, columns, inner).to(E4M3).T
    of_rows, of_columns = torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device)
    one = torch.ones((), device=device)
    flops, nbytes = 2.0 * rows * inner * columns, rows * inner + inner * columns + 2.0 * rows * columns
    sizes = {"rows": rows, "inner": inner, "columns": columns}

    def forward() -> Tensor:
        return torch._scaled_mm(
            x, w, scale_a=of_rows, scale_b=of_columns, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def backward() -> Tensor:
        return torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    yield timed_row("fp8_gemm", forward, device, sizes=sizes, flops=flops, nbytes=nbytes)
    yield timed_row("fp8_gemm", backward, device, sizes=sizes, flops=flops, nbytes=nbytes, phase="backward")


def _casts(device: torch.device, rows: int, width: int) -> Iterator[Row]:
    x = random_tensor(device, torch.bfloat16, rows, width)
    for dimension, each in ((-1, ALONG_BYTES), (0, ACROSS_BYTES)):
        torch._dynamo.reset()  # or the next shapes would reach the limit of recompilations
        compiled = torch.compile(round_by_row, dynamic=False)
        sizes = {"rows": rows, "width": width, "across": 1 + dimension}
        run = lambda c=compiled, d=dimension: c(x, d)  # noqa: E731
        yield timed_row("fp8_cast", run, device, sizes=sizes, nbytes=float(each * x.numel()))


def round_by_row(x: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """x in fp8, and the scale of each slice along `dimension`: a power of two, as torchao takes it."""
    limit = torch.finfo(E4M3).max
    largest = x.abs().amax(dimension, keepdim=True).double().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2((limit / largest).float())))
    return (x.float() * scale).clamp(-limit, limit).to(E4M3), scale


def _linear(device: torch.device, rows: int, inner: int, columns: int) -> Iterator[Row]:
    model = nn.Sequential(nn.Linear(inner, columns, bias=False, device=device, dtype=torch.bfloat16))
    apply_float8(model, ["0"], device)
    torch._dynamo.reset()
    compiled = torch.compile(model[0].forward, dynamic=False)
    x = random_tensor(device, torch.bfloat16, rows, inner, grad=True)
    sizes, flops = {"rows": rows, "inner": inner, "columns": columns}, 2.0 * rows * inner * columns
    yield from both_phases("fp8_linear", lambda: compiled(x), (x, model[0].weight), device, sizes, flops)
