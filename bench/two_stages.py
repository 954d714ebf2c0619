"""A run through two context stages with a change of layout between them: stopped once and gone on with, and
held against the run that nothing stopped; what is shown of a run is asked for meanwhile, and looked for.

    python -m bench.two_stages --device cpu                      # two gloo ranks, as a check of itself
    python -m bench.two_stages --device cuda --devices 2 --prepare build/two_stages   # where the planner is
    python -m bench.two_stages --device cuda --devices 2 --prepared build/two_stages --out FILE.json

Both runs are started as `shipway launch` starts them: supervisor, torchrun, ranks. The second is asked to
stop (SIGTERM to the supervisor) within the first stage, and started again. Fails when a step is missing or
double, when other tokens were trained on, when a loss is further from the unbroken one's than
LOSS_TOLERANCE, or when something that observability promises on this device is missing: a profile by request
file and one by SIGUSR2, seconds of communication by mesh axis, a snapshot of memory, utilisation, memory and
MFU beside the plan's, Prometheus.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from bench.breaking import last_step, steps_of

ROOT = Path(__file__).resolve().parents[1]
BLUEPRINT = ROOT / "bench" / "blueprints" / "soak.yaml"
LOSS_TOLERANCE = {"cpu": 0.0, "cuda": 0.03}
"""Largest relative difference of any step's loss: in one layout a CPU goes on bit for bit; a GPU adds up with
atomics, and bf16 routes what is near a tie by the last bit."""
STEPS = {"cpu": 12, "cuda": 60}
"""Of a stage: a request for a profile is looked for once a second, and must fall into it."""
STOPPED_AFTER_STEP = 5
PREEMPTED = 75
LIMIT_SECONDS = 240.0
WIDE = (
    *("model.width=256", "model.attention.delta.chunk=64", "model.attention.latent.query_rank=128"),
    *(f"model.attention.delta.{name}=128" for name in ("key_width", "value_width", "decay_rank")),
    *(f"model.attention.latent.{name}=128" for name in ("kv_rank", "nope_width", "value_width")),
    "model.attention.latent.rope_width=64",
    *("training.precision.compute=bf16", "model.feed_forward.experts.inner_width=64"),
)
"""Widths that the GPU's kernels are made for."""


def overrides(device: str, devices: int) -> list[str]:
    """What the blueprint is given: stages of two contexts, and of two layouts where there are two devices."""
    first, second = ("{expert_parallel: 2}", "{context_parallel: 2}") if devices > 1 else ("{}", "{}")
    rate = "learning_rate: {kind: wsd, peak: 1e-3}"
    cluster = [f"cluster=h200_{devices}"] if device == "cuda" else [f"cluster.devices_per_node={devices}"]
    steps = STEPS[device]
    return [
        *(cluster + list(WIDE) if device == "cuda" else cluster),
        "training.stages=["
        f"{{name: short, context: 256, tokens: {steps}Ki, global_batch: 1Ki, layout: {first}, {rate}}},"
        f"{{name: long, context: 512, tokens: {2 * steps}Ki, global_batch: 2Ki, layout: {second}, {rate}}}]",
        f"training.checkpoints.every_steps={steps // 2}",
        "+training.observability={details_every_steps: 2, prometheus_port: 0}",
    ]


def prepare(folder: Path, device: str, devices: int) -> Path:
    """Plan and build."""
    from shipway.compiler.compose import compose
    from shipway.compiler.emit.build import build
    from shipway.compiler.pipeline import make_plan
    from shipway.compiler.validate import validate
    from shipway.schemas.plan import Plan

    blueprint, diagnostics = validate(compose(str(BLUEPRINT), tuple(overrides(device, devices)), None))
    plan = make_plan(blueprint) if blueprint is not None else diagnostics
    if not isinstance(plan, Plan):
        raise SystemExit(str(plan))
    assert all(stage.layout.world_size == devices for stage in plan.stages)
    build(plan, folder, force=True)
    return folder


@dataclass
class Run:
    """A run's folder, and the supervisor that is training it."""

    build: Path
    folder: Path
    device: str
    _starts: int = 0
    _supervisor: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """As `shipway launch` does, once it has checked plan and machine."""
        self._starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "shipway.runtime.supervisor", str(self.build)]
        with self.log.open("w") as log:
            self._supervisor = subprocess.Popen(
                [*command, "--run-dir", str(self.folder), "--device", self.device],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    @property
    def log(self) -> Path:
        """What this start's supervisor says."""
        return self.folder / f"start{self._starts}.log"

    def wait(self) -> int:
        """Exit code."""
        assert self._supervisor is not None
        return self._supervisor.wait(LIMIT_SECONDS)

    def stop(self) -> None:
        """As a scheduler does."""
        assert self._supervisor is not None
        self._supervisor.send_signal(signal.SIGTERM)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds or the run has ended."""
        assert self._supervisor is not None
        began = time.monotonic()
        while not condition() and self._supervisor.poll() is None:
            if time.monotonic() - began > LIMIT_SECONDS:
                self._supervisor.kill()
                raise SystemExit(f"what was waited for did not come: see {self.log}")
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        newest = max((self.folder / "attempts").iterdir(), key=lambda f: int(f.name))
        return [int(path.read_text()) for path in sorted(newest.glob("rank*.pid"))]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl about something else than a step."""
        lines = [json.loads(text) for text in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line.get("event") == kind]


def unbroken(run: Run) -> dict[str, str]:
    """Train to the end; returns what Prometheus was told by the name of the stage."""
    run.start()
    told = {}
    for stage, first in (("short", 2), ("long", STEPS[run.device] + 2)):
        run.until(lambda first=first: last_step(run.folder) >= first)  # type: ignore[misc]
        if stage == "short":
            (run.folder / "profile.request").write_text(json.dumps({"steps": 2, "memory": True}))
        else:
            os.kill(run.ranks()[-1], signal.SIGUSR2)
        told[stage] = scrape(run.log)
    if code := run.wait():
        raise SystemExit(f"the unbroken run left with {code}: see {run.log}\n{run.log.read_text()[-3000:]}")
    return told


def broken(run: Run) -> int:
    """Train, be asked to stop, go on to the end; returns the exit code of the stop."""
    run.start()
    run.until(lambda: last_step(run.folder) >= STOPPED_AFTER_STEP)
    run.stop()
    code = run.wait()
    run.start()
    if last := run.wait():
        raise SystemExit(f"gone on with, it left with {last}: see {run.log}\n{run.log.read_text()[-3000:]}")
    return code


def scrape(log: Path) -> str:
    """Prometheus' text, from where the run says that it is."""
    found = re.search(r"http://[^:]+:(\d+)/metrics", log.read_text())
    if found is None:
        return ""
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def differences(mine: Path, theirs: Path, code: int, tolerance: float) -> Iterator[str]:
    """What of a broken run is not as it must be."""
    a, b = steps_of(mine), steps_of(theirs)
    if code != PREEMPTED:
        yield f"asked to stop it left with {code}, not {PREEMPTED}"
    if [s["step"] for s in a] != [s["step"] for s in b]:
        yield "a step is missing or double"
    if any(x["stream_hash"] != y["stream_hash"] for x, y in zip(a, b, strict=False)):
        yield "other tokens were trained on"
    if (off := largest_difference(mine, theirs)) > tolerance:
        yield f"a loss differs by {off:.2%}"


def largest_difference(mine: Path, theirs: Path) -> float:
    """Of any step's loss, relative."""
    pairs = zip(steps_of(mine), steps_of(theirs), strict=False)
    return max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs)


def shown(run: Run, prometheus: dict[str, str], ranks: int) -> dict[str, Any]:
    """What observability gave, by what it is; None, or empty, where it gave nothing."""
    details = [json.loads(text) for text in (run.folder / "details.jsonl").read_text().splitlines()]
    steps, profiles = steps_of(run.folder), run.events("profile")
    folders = sorted((run.folder / "profiles").iterdir())
    snapshots = [pickle.loads(path.read_bytes()) for path in sorted(folders[0].glob("*.memory.pickle"))]
    traces = [len(list(folder.glob("rank*.trace.json"))) for folder in folders]
    return {
        "profiles": len(profiles),
        "traces": traces if set(traces) == {ranks} else [],
        "communication_seconds_per_step": [p["communication_seconds_per_step"] for p in profiles],
        "planned_communication_seconds_per_step": [
            p["planned_communication_seconds_per_step"] for p in profiles
        ],
        "memory_snapshots": [len(s["segments"]) for s in snapshots],
        "utilisation": [d["utilisation"] for d in details if d["utilisation"]][-1:],
        "memory_allocated_bytes": [steps[-1]["memory_allocated_bytes"]],
        "planned_memory_allocated_bytes": [steps[-1]["planned_memory_allocated_bytes"]],
        "mfu": [steps[-1]["mfu"], steps[-1]["planned_mfu"]],
        "expert_hits_of_layers": len(details[-1]["expert_hits"]),
        "prometheus_figures": {
            stage: len(re.findall(r"^shipway_", text, re.M)) for stage, text in prometheus.items()
        },
    }


def missing(found: dict[str, Any], device: str, devices: int) -> Iterator[str]:
    """What should have been shown and was not."""
    wanted = ["traces", "mfu", "expert_hits_of_layers"]
    if device == "cuda":
        wanted += ["memory_snapshots", "utilisation", "memory_allocated_bytes"]
    for name in wanted:
        if not found[name] or found[name] == [None]:
            yield f"{name}: nothing"
    if found["profiles"] != 2:
        yield f"{found['profiles']} profiles, not one asked for by file and one by signal"
    if device == "cuda" and len(found["memory_snapshots"]) != devices:
        yield "a rank left no snapshot of its memory"
    if not all(found["prometheus_figures"].values()):
        yield "Prometheus was told nothing"
    if devices > 1:
        axes = [set(seconds) for seconds in found["communication_seconds_per_step"]]
        if device == "cuda" and not (len(axes) == 2 and "ep" in axes[0] and "cp" in axes[1]):
            yield f"communication by axis: {axes}, without ep in the first stage or cp in the second"
        if not all(axes):
            yield "no seconds of communication"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when all is as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", type=int, choices=(1, 2), default=2)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="build there, run nothing")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="take the build from there")
    parser.add_argument("--folder", type=Path, help="of both runs; by default a new one")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    if options.prepare:
        print(prepare(options.prepare.resolve(), options.device, options.devices))
        return 0
    folder = (options.folder or Path(mkdtemp(prefix="two-stages-"))).resolve()
    build = options.prepared or prepare(folder / "build", options.device, options.devices)
    whole, stopped = (Run(build.resolve(), folder / name, options.device) for name in ("unbroken", "broken"))
    began = time.monotonic()
    prometheus = unbroken(whole)
    between = time.monotonic()
    code = broken(stopped)
    found = shown(whole, prometheus, options.devices)
    tolerance = LOSS_TOLERANCE[options.device]
    problems = [
        *differences(stopped.folder, whole.folder, code, tolerance),
        *missing(found, options.device, options.devices),
    ]
    result = record(options, whole, stopped, found, problems)
    result["seconds"] = {"unbroken": between - began, "broken": time.monotonic() - between}
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    print(text)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


def record(
    options: argparse.Namespace, whole: Run, stopped: Run, found: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    """The result as data."""
    import torch

    from shipway.runtime.build_folder import read_plan

    plan = read_plan(whole.build)
    steps = steps_of(whole.folder)
    on_gpus = options.device == "cuda"
    return {
        "command": f"python -m bench.two_stages --device {options.device} --devices {options.devices}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": f"{options.devices} x {torch.cuda.get_device_name()}" if on_gpus else platform.machine(),
        "precision": plan.blueprint.training.precision.compute,
        "stages": {stage.name: stage.layout.model_dump(mode="json") for stage in plan.stages},
        "steps": len(steps),
        "stopped_after_step": STOPPED_AFTER_STEP,
        "first_and_last_loss": [steps[0]["loss"], steps[-1]["loss"]],
        "largest_difference_of_a_loss": largest_difference(stopped.folder, whole.folder),
        "loss_tolerance": LOSS_TOLERANCE[options.device],
        "stream_hash": [steps[-1]["stream_hash"], steps_of(stopped.folder)[-1]["stream_hash"]],
        "shown": found,
        "problems": problems,
    }


if __name__ == "__main__":
    sys.exit(main())
