"""The bounded decay against the unbounded one: the delta kernel from 8K to 1M tokens of one sequence.

    python bench/decay.py --out bench/results/decay-h200.json

Forward and backward of one layer's delta rule with heads of 128, bf16, chunk 64. The bound (a log decay kept
above -5 a token) lets the kernel work in tiles without rescaling; this says what that is worth.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch

from shipway.runtime import kernels
from shipway.runtime.calibration.timing import time_operation

WIDTH, CHUNK, BOUND = 128, 64, -5.0


def main() -> int:
    """Measure every length twice and write one row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shortest", type=int, default=8192)
    parser.add_argument("--longest", type=int, default=1 << 20)
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, tokens = [], options.shortest
    while tokens <= options.longest:
        row = {"tokens": tokens, "heads": options.heads, **measure(device, tokens, options.heads)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps(described(device, rows), indent=1) + "\n")
        tokens *= 2
    return 0


def described(device: torch.device, rows: list[dict[str, float]]) -> dict[str, object]:
    """What is kept: command, versions, date, figures."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "rows": rows,
    }


def measure(device: torch.device, tokens: int, heads: int) -> dict[str, float]:
    """Seconds of forward and backward, by gate."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, g = (
        torch.randn(1, tokens, heads, WIDTH, device=device, dtype=dtype, requires_grad=True) for _ in range(4)
    )
    beta = torch.randn(1, tokens, heads, device=device, dtype=dtype, requires_grad=True)
    a_log, dt_bias = torch.zeros(heads, device=device), torch.zeros(heads * WIDTH, device=device)
    found = {}
    for name, bound in (("bounded", BOUND), ("unbounded", None)):

        def forward(bound: float | None = bound) -> torch.Tensor:
            return kernels.delta_rule(q, k, v, g, beta, a_log, dt_bias, lower_bound=bound, chunk=CHUNK)[0]

        output = forward()
        weight = torch.randn_like(output)
        with torch.no_grad():
            found[f"{name}_forward_seconds"] = time_operation(forward, device, repeats=7).seconds
        found[f"{name}_backward_seconds"] = time_operation(
            lambda: torch.autograd.grad(output, (q, k, v, g, beta), weight, retain_graph=True),  # noqa: B023
            device,
            repeats=7,
        ).seconds
    return found


if __name__ == "__main__":
    sys.exit(main())
