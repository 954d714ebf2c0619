"""Tuned launch configurations of fla-core's Triton kernels, kept per device so that a first step is quick.

Without them every kernel is compiled and timed in each of its configurations when it first runs:
minutes on a fresh machine. `python -m shipway.runtime.kernels.tuning --out FOLDER` tunes them again;
the folder `tuned/` holds what it wrote on the devices named there, in fla-core's own format.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

TUNED = Path(__file__).parent / "tuned"


def use_shipped() -> Path | None:
    """Point fla-core at our configurations of this device, unless the user has set its variables.

    Must be called before fla is imported: it reads its environment once.
    """
    folder = TUNED / re.sub(r"[^0-9A-Za-z]+", "_", torch.cuda.get_device_name()).strip("_")
    if not folder.is_dir() or "FLA_CONFIG_DIR" in os.environ or "FLA_CACHE_MODE" in os.environ:
        return None
    os.environ["FLA_CONFIG_DIR"] = str(folder)
    # The best of one size serves the others, and an untuned form gets its kernel's default: no step waits.
    os.environ["FLA_CACHE_MODE"] = "full"
    return folder


def tune(folder: Path, widths: tuple[int, ...] = (128,)) -> int:
    """Tune every fla kernel that our operations use and write one file per kernel; returns how many."""
    os.environ["FLA_CACHE_MODE"] = "disabled"
    _compile_in_parallel(os.cpu_count() or 1)
    for width in widths:
        for name, run in _calls(width):
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            print(f"{name:32s} width {width:4d} {time.perf_counter() - start:8.1f} s", flush=True)
    return _write(folder)


def _compile_in_parallel(threads: int) -> None:
    """Let the autotuner compile all configurations of a kernel at once before it times them."""
    from fla.ops.utils.cache import AutotuneKey
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    # Short timings rank configurations as well as Triton's default of 125 ms each.
    Autotuner.do_bench = staticmethod(partial(do_bench, warmup=5, rep=25))
    executor = ThreadPoolExecutor(threads)
    serial = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = AutotuneKey.build(self.arg_names, self.keys, args, kwargs).autotune_key
        if len(self.configs) > 1 and key not in self.cache:
            call = {key: value for key, value in kwargs.items() if key != "warmup"}
            with AsyncCompileMode(executor, ignore_errors=True):
                self.warmup(*args, **call)
        return serial(self, *args, **kwargs)

    Autotuner.run = run


def _calls(width: int) -> list[tuple[str, Callable[[], object]]]:
    """Forward and backward of each operation that fla serves, whole rows and packed documents."""
    from shipway.runtime import kernels

    tokens, heads, channels = 8192, 16, 16 * width

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.5).requires_grad_()

    documents = torch.arange(0, tokens + 1, tokens // 4, device="cuda", dtype=torch.int32)
    q, k, v, g = (leaf(1, tokens, heads, width) for _ in range(4))
    beta, a_log = leaf(1, tokens, heads), torch.zeros(heads, device="cuda", requires_grad=True)
    dt_bias = torch.zeros(heads * width, device="cuda", requires_grad=True)

    def delta(bound: float | None, bounds: torch.Tensor | None) -> None:
        out, _ = kernels.delta_rule(
            q, k, v, g, beta, a_log, dt_bias, lower_bound=bound, chunk=64, cu_seqlens=bounds
        )
        out.sum().backward()

    def convolution(bounds: torch.Tensor | None) -> None:
        x, weight = leaf(1, tokens, channels), leaf(channels, 4)
        kernels.short_convolution(x, weight, bounds, output_final=True)[0].sum().backward()

    return [
        ("convolution", lambda: convolution(None)),
        ("convolution, documents", lambda: convolution(documents)),
        ("delta rule, bounded", lambda: delta(-5.0, None)),
        ("delta rule, bounded, documents", lambda: delta(-5.0, documents)),
        ("delta rule, unbounded", lambda: delta(None, None)),
    ]


def _write(folder: Path) -> int:
    """One JSON file per kernel that was tuned."""
    import triton
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner

    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for tuner in (thing for thing in gc.get_objects() if isinstance(thing, CachedAutotuner)):
        for key, config in tuner.cache.items():
            entries = found.setdefault(tuner.kernel_name, {})
            entries[AutotuneKey.key_hash(key)] = {
                "autotune_key": AutotuneKey.normalize_autotune_key(key),
                "config": {
                    "kwargs": config.kwargs,
                    "num_warps": config.num_warps,
                    "num_stages": config.num_stages,
                    "num_ctas": config.num_ctas,
                    "maxnreg": config.maxnreg,
                },
            }
    for name, entries in found.items():
        content = {
            "kernel_name": name,
            "triton_version": triton.__version__,
            "autotune_entries": entries,
            "default_config": _default(entry["config"] for entry in entries.values()),
        }
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return len(found)


def _default(configs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What serves forms that were not tuned: of the best ones the least in need of shared memory."""
    return min(configs, key=lambda config: (config["num_stages"], json.dumps(config, sort_keys=True)))


def main(arguments: list[str] | None = None) -> int:
    """Tune on this machine's first GPU."""
    parser = argparse.ArgumentParser(description="Tune fla-core's kernels on this device.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    print(f"{tune(options.out)} kernels written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
