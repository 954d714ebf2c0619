"""The parity table: which layouts train what one process trains, shown by training.

`python -m shipway.runtime.parity [--device cuda] [--only NAME]` runs a small generated model for a few
steps from one seed under every layout of `LAYOUTS`, on real process groups, and holds loss, gradient
norm, every gradient and the experts' loads against those of one process. Exit code 1 when a layout is off.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.parallel.support import check_layout
from shipway.runtime.parity_ranks import MICRO_SEQUENCES, SEQUENCES, Trace, run_layouts
from shipway.schemas.layout import Layout

ALONE = Layout(micro_batch=SEQUENCES)
"""The reference: one process, no accumulation."""

TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}
"""Largest relative difference, fp32: of every gradient, and of the first step's loss and norm. On
GPUs the kernels of both sides multiply in reduced precision."""

LATER = "later steps"
GROWTH = 10
"""What rounding may grow by in the steps that follow: Muon brings small singular values to one."""


def layout(name_of_axes: str = "", **options: Any) -> Layout:
    """A layout by the short names of its axes, "tp 2, ep 2", its micro-batches filling the step."""
    fields = {
        "pp": "pipeline_parallel",
        "rep": "data_parallel_replicate",
        "fsdp": "data_parallel_shard",
        "cp": "context_parallel",
        "tp": "tensor_parallel",
        "ep": "expert_parallel",
    }
    pairs = [axis.split() for axis in name_of_axes.split(", ") if axis]
    values = {"micro_batch": MICRO_SEQUENCES} | {fields[axis]: int(n) for axis, n in pairs} | options
    rows = values.get("data_parallel_replicate", 1) * values.get("data_parallel_shard", 1)
    return Layout.model_validate(values | {"micro_batches": SEQUENCES // rows // values["micro_batch"]})


PIPELINE: Mapping[str, Any] = {
    "schedule": "1f1b",
    "zero": 2,
    "micro_batch": 1,
    "stage_layers": ((0, 2), (2, 4)),
}
INTERLEAVED: Mapping[str, Any] = PIPELINE | {
    "schedule": "interleaved_1f1b",
    "virtual_stages": 2,
    "stage_layers": ((0, 1), (1, 2), (2, 3), (3, 4)),
}

LAYOUTS: Mapping[str, Layout] = {
    "accumulation": layout(),
    "fsdp 2": layout("fsdp 2"),
    "fsdp 4": layout("fsdp 4"),
    "fsdp 2, zero 2": layout("fsdp 2", zero=2),
    "rep 2, fsdp 2": layout("rep 2, fsdp 2"),
    "fsdp 2, full recomputation": layout("fsdp 2", recompute="full"),
    "fsdp 2, selective recomputation": layout("fsdp 2", recompute="selective"),
    "fsdp 2, ep 2": layout("fsdp 2, ep 2"),
    "fsdp 4, ep 2": layout("fsdp 4, ep 2"),
    "fsdp 4, ep 4": layout("fsdp 4, ep 4"),
    "rep 2, fsdp 2, ep 2": layout("rep 2, fsdp 2, ep 2"),
    "fsdp 4, ep 2, full recomputation": layout("fsdp 4, ep 2", recompute="full"),
    "fsdp 4, ep 4, selective recomputation": layout("fsdp 4, ep 4", recompute="selective"),
    "tp 2": layout("tp 2"),
    "tp 4": layout("tp 4"),
    "tp 2, full recomputation": layout("tp 2", recompute="full"),
    "fsdp 2, tp 2": layout("fsdp 2, tp 2"),
    "rep 2, tp 2": layout("rep 2, tp 2"),
    "tp 2, ep 2": layout("tp 2, ep 2"),
    "fsdp 2, tp 2, ep 2": layout("fsdp 2, tp 2, ep 2"),
    "fsdp 2, tp 2, ep 4, selective recomputation": layout("fsdp 2, tp 2, ep 4", recompute="selective"),
    "fsdp 4, tp 2, ep 4": layout("fsdp 4, tp 2, ep 4"),
    "cp 2": layout("cp 2"),
    "cp 4": layout("cp 4"),
    "fsdp 2, cp 2": layout("fsdp 2, cp 2"),
    "cp 2, ep 2": layout("cp 2, ep 2"),
    "cp 2, tp 2": layout("cp 2, tp 2"),
    "fsdp 2, cp 2, tp 2, ep 4": layout("fsdp 2, cp 2, tp 2, ep 4"),
    "pp 2": layout("pp 2", **PIPELINE),
    "pp 2, interleaved": layout("pp 2", **INTERLEAVED),
    "pp 2, full recomputation": layout("pp 2", **PIPELINE, recompute="full"),
    "pp 2, fsdp 2, ep 2": layout("pp 2, fsdp 2, ep 2", **PIPELINE),
    "pp 2, tp 2": layout("pp 2, tp 2", **PIPELINE),
    "pp 2, cp 2": layout("pp 2, cp 2", **PIPELINE),
    "pp 2, fsdp 2, tp 2, ep 4": layout("pp 2, fsdp 2, tp 2, ep 4", **PIPELINE),
}
"""Every axis alone, and the combinations that plans are made of."""


@dataclass(frozen=True)
class Verdict:
    """How far a layout is from one process."""

    name: str
    ranks: int
    differences: dict[str, float] = field(default_factory=dict)
    """Largest relative difference by what was compared."""
    reason: str = ""
    """Why it did not run, if it did not."""
    refused: bool = False
    """Whether the runtime says that it cannot run it: neither proven nor off."""

    def proven(self, tolerance: float) -> bool:
        """Whether it ran and nothing differs by more than the tolerance."""
        return not self.reason and all(
            value <= tolerance * (GROWTH if what == LATER else 1) for what, value in self.differences.items()
        )


def compare(expected: Trace, found: Trace) -> dict[str, float]:
    """Largest relative differences of a layout's trace; loads by the choices that moved."""
    differences = {
        "loss": _largest(expected.losses[:1], found.losses[:1]),
        "norm": _largest(expected.norms[:1], found.norms[:1]),
        LATER: _largest(expected.losses[1:] + expected.norms[1:], found.losses[1:] + found.norms[1:]),
        "loads": max((_moved(load, found.loads.get(n)) for n, load in expected.loads.items()), default=0.0),
    }
    for name, whole in expected.gradients.items():
        mine = found.gradients.get(name)
        off = torch.inf if mine is None else float((mine - whole).norm() / whole.norm().clamp(min=1e-12))
        group = group_of(name)
        differences[group] = max(differences.get(group, 0.0), off)
    return differences


def group_of(parameter: str) -> str:
    """The column of the table that a parameter's gradient is in."""
    for group in ("router", "experts", "shared", "latent_", "residual", "norm", "attention"):
        if group in parameter:
            return group.rstrip("_")
    return "ends" if parameter.startswith(("embed", "head")) else "dense"


def _moved(expected: list[int], found: list[int] | None) -> float:
    """Share of a layer's choices that went to other experts."""
    if found is None:
        return torch.inf
    return sum(abs(f - e) for e, f in zip(expected, found, strict=True)) / 2 / max(sum(expected), 1)


def _largest(expected: list[float], found: list[float]) -> float:
    if len(expected) != len(found):
        return torch.inf
    return max(abs(f - e) / max(abs(e), 1e-12) for e, f in zip(expected, found, strict=True))


def judge(layouts: Mapping[str, Layout], build: Path, device: str) -> list[Verdict]:
    """Run layouts, those of equal size in one set of processes, and compare each with one process."""
    (alone,) = run_layouts([ALONE], build, device)
    if isinstance(alone, str):
        raise Fatal(f"one process does not run: {alone}")
    verdicts: dict[str, Verdict] = {}
    for name, wanted in layouts.items():
        try:
            check_layout(wanted)
        except Fatal as refusal:
            verdicts[name] = Verdict(name, wanted.world_size, reason=str(refusal), refused=True)
    left = {name: wanted for name, wanted in layouts.items() if name not in verdicts}
    for ranks in sorted({wanted.world_size for wanted in left.values()}):
        names = [name for name, wanted in left.items() if wanted.world_size == ranks]
        for name, trace in zip(names, run_layouts([left[n] for n in names], build, device), strict=True):
            verdicts[name] = (
                Verdict(name, ranks, reason=trace)
                if isinstance(trace, str)
                else Verdict(name, ranks, compare(alone, trace))
            )
    return [verdicts[name] for name in layouts]


def show(verdicts: list[Verdict], tolerance: float) -> None:
    """The table, in the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Layouts against one process: fp32, within {tolerance:g} of each")
    for column, side in (("layout", "left"), ("ranks", "right"), ("verdict", "left")):
        table.add_column(column, justify=side, no_wrap=True)  # type: ignore[arg-type]
    columns = sorted({key for verdict in verdicts for key in verdict.differences})
    for column in columns:
        table.add_column(column, justify="right")
    for verdict in verdicts:
        if verdict.refused:
            word = "[yellow]not run by this version[/]"
        elif verdict.reason:
            word = f"[red]failed: {verdict.reason.strip().splitlines()[-1]}[/]"
        elif verdict.proven(tolerance):
            word = "[green]proven[/]"
        else:
            word = f"[red]off by {max(verdict.differences.values()):.1e}[/]"
        cells = (f"{verdict.differences[c]:.0e}" if c in verdict.differences else "" for c in columns)
        table.add_row(verdict.name, str(verdict.ranks), word, *cells)
    Console(width=max(Console().width, 190)).print(table)


def build_tiny(folder: Path) -> Path:
    """A build folder of the tiny blueprint, by the command that users have."""
    command = [str(Path(sys.executable).with_name("shipway")), "build", "tiny", "model.layers=4"]
    made = subprocess.run([*command, "--out", str(folder), "--quiet"], capture_output=True, text=True)
    if made.returncode:
        raise Fatal(f"the small model could not be built: {made.stderr.strip() or made.stdout.strip()}")
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0 when no layout that runs is off."""
    parser = argparse.ArgumentParser(prog="python -m shipway.runtime.parity", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="may be given again")
    parser.add_argument("--build", type=Path, help="a build folder; by default the tiny blueprint's is made")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only if name not in LAYOUTS]
    if unknown:
        parser.error(f"no layout {', '.join(map(repr, unknown))}; there are: {'; '.join(LAYOUTS)}")
    most = torch.cuda.device_count() if options.device == "cuda" else 8
    chosen = {name: wanted for name, wanted in LAYOUTS.items() if name in (options.only or LAYOUTS)}
    runnable = {name: wanted for name, wanted in chosen.items() if wanted.world_size <= most}
    with TemporaryDirectory() as folder:
        verdicts = judge(runnable, options.build or build_tiny(Path(folder) / "tiny"), options.device)
    show(verdicts, TOLERANCE[options.device])
    if len(runnable) < len(chosen):
        print(f"left out for want of devices: {'; '.join(sorted(chosen.keys() - runnable.keys()))}")
    return int(any(not v.refused and not v.proven(TOLERANCE[options.device]) for v in verdicts))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Fatal as error:
        sys.exit(f"parity: {error}")
