"""Time and memory of `make_plan` over cluster sizes and over models; time of the whole command for k3.

CPU seconds count helpers (compiler/forked.py), and say more than seconds where other work runs beside: of the
command, run several times, the best of both and the median are kept.

Run: python bench/plan_speed.py [--out bench/results/plan_speed.json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

MODELS = ("tiny", "small_h200", "llama31_8b", "llama31_405b", "qwen3_235b", "deepseek_v3", "kimi_k2", "k3")
PROCESSES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
TIMES = 15
"""Runs of the whole command."""
SIZES = (8, 64, 512, 1024, 4096, 10_240, 32_768, 131_072)


def one(model: str, devices: int | None) -> dict[str, Any]:
    """Plan once in this process."""
    began = time.perf_counter()
    from shipway.compiler.compose import compose
    from shipway.compiler.pipeline import make_plan
    from shipway.compiler.validate import validate
    from shipway.schemas.plan import Plan

    imported = time.perf_counter()
    overrides = ("cluster=h100_1280x8", f"cluster.nodes={max(devices // 8, 1)}") if devices else ()
    blueprint, _ = validate(compose(model, overrides, None))
    assert blueprint is not None
    validated = time.perf_counter()
    cpu = cpu_seconds()
    made = make_plan(blueprint)
    done = time.perf_counter()
    return {
        "model": model,
        "devices": blueprint.cluster.devices,
        "import_seconds": round(imported - began, 3),
        "validate_seconds": round(validated - imported, 3),
        "plan_seconds": round(done - validated, 3),
        "plan_cpu_seconds": round(cpu_seconds() - cpu, 3),
        "peak_mib": max(resource.getrusage(who).ru_maxrss for who in PROCESSES) // 1024,
        "layouts": sum(stage.candidates for stage in made.stages) if isinstance(made, Plan) else 0,
        "fits": isinstance(made, Plan),
    }


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in PROCESSES]
    return sum(one.ru_utime + one.ru_stime for one in used)


def growth(rows: list[dict[str, Any]]) -> float:
    """How many times the CPU seconds multiply while devices multiply tenfold: least squares of logarithms."""
    fitting = [row for row in rows if row["fits"]]
    sizes, seconds = ([math.log10(row[name]) for row in fitting] for name in ("devices", "plan_cpu_seconds"))
    return 10 ** linear_regression(sizes, seconds).slope


def whole(model: str) -> dict[str, Any]:
    """The command as a user types it, table and all, from the start of its process to its end."""
    runs = []
    for _ in range(TIMES):
        began, cpu = time.perf_counter(), cpu_seconds()
        command = [str(Path(sys.executable).with_name("shipway")), "plan", model]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        runs.append((time.perf_counter() - began, cpu_seconds() - cpu))
    seconds, cpus = zip(*runs, strict=True)
    return {
        "command": f"shipway plan {model}",
        "runs": TIMES,
        "best_seconds": round(min(seconds), 3),
        "median_seconds": round(median(seconds), 3),
        "best_cpu_seconds": round(min(cpus), 3),
        "median_cpu_seconds": round(median(cpus), 3),
        "load_average": round(os.getloadavg()[0], 1),
    }


def fresh(model: str, devices: int | None) -> dict[str, Any]:
    """Plan in a process of its own, so that imports and memory are its own."""
    command = [sys.executable, __file__, "--one", model, *([str(devices)] if devices else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs="+", metavar="MODEL [DEVICES]", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        model, *devices = arguments.one
        print(json.dumps(one(model, int(devices[0]) if devices else None)))
        return
    command = whole("k3")
    print(
        f"{command['command']}: {command['best_seconds']:.2f} s at best of {TIMES},"
        f" {command['median_seconds']:.2f} s in the median, CPU {command['best_cpu_seconds']:.2f} s at best,"
        f" load average {command['load_average']}"
    )
    models, sizes = [fresh(model, None) for model in MODELS], [fresh("k3", size) for size in SIZES]
    for row in (*models, *sizes):
        print(
            f"{row['model']:14s} {row['devices']:>8,} devices  {row['layouts']:>10,} layouts"
            f"  plan {row['plan_seconds']:6.2f} s (cpu {row['plan_cpu_seconds']:5.2f})"
            f"  import {row['import_seconds']:.2f}  validate {row['validate_seconds']:.2f}"
            f"  {row['peak_mib']} MiB  {'fits' if row['fits'] else 'nothing fits'}"
        )
    print(f"k3, ten times the devices: {growth(sizes):.2f} times the CPU seconds")
    if arguments.out:
        facts = {
            "command": f"python bench/plan_speed.py --out {arguments.out}",
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("shipway", "numpy", "pydantic")},
            "times_for_ten_times_the_devices": round(growth(sizes), 2),
            "whole_command": command,
            "models": models,
            "k3_by_devices": sizes,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
