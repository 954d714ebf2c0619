"""Kills, stops and reshards a run at random moments, and holds what comes of it against the unbroken run.

    make soak                       # 30 moments, about five minutes on two cores; bench/results/soak.json
    python -m bench.soak --moments 4 --seed 7 --out /tmp/soak.json
    python -m bench.soak --torchrun                        # each start as supervisors make it: slower
    python -m bench.soak --launch                          # as launched: bench/results/soak-launch.json
    python -m bench.soak --folder /tmp/soak --minutes 4    # in pieces: say it again until it is done

Two runs are broken, in real processes: one always starts again in the layout that it
was stopped in, the other each time in another layout and number of processes. Shown for both: every step
is there once, the hash over all tokens of all ranks equals the unbroken run's at every step, no more is
lost than the steps since the last checkpoint (and those made while a save was in flight), nothing at all
when the run was asked to stop, and the loss is the unbroken one's: bit for bit in the same layout,
within LOSS_TOLERANCE across layouts.

With --launch it is one run, through `shipway launch`: supervisor, torchrun and ranks, two stages of different
layouts. Its supervisor is killed, too, and some of its starts are by hand with twice the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp

from bench.breaking import KINDS, LOSE_NOTHING, SUPERVISOR, Outcome, Soak, Start, describe, draw, steps_of

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "soak.json"
BLUEPRINT = ROOT / "bench" / "blueprints" / "soak.yaml"
LOSS_TOLERANCE = 0.005
"""Largest relative difference of a step's loss after changes of layout: sums in another order, in fp32,
part ways slowly over a hundred steps of Muon and top-k routing; 0.00007 in the kept result."""
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "fsdp 2": (2, {}),
    "alone": (1, {}),
    "tp 2": (2, {"tensor_parallel": 2}),
    "fsdp 2, ep 2": (2, {"expert_parallel": 2}),
    "cp 2": (2, {"context_parallel": 2}),
    "replicas 2": (2, {"data_parallel_replicate": 2}),
    "fsdp 4": (4, {"micro_batch": 1}),
    "pp 2": (2, {"pipeline_parallel": 2}),
}
"""Processes and pinned degrees by name; what is left over is FSDP. The first is the unbroken run's."""
LAUNCHED = {"launched": 2, "by hand, 4 processes": 4}
"""Processes of starts through `shipway launch`, and of those by hand; the first are the plan's."""
BY_HAND_EVERY = 6
"""Every such start is one by hand."""
LAUNCHED_STAGES = (
    "training.stages.0.layout={expert_parallel: 2}",
    "training.stages.1.layout={context_parallel: 2}",
    "training.micro_batch=1",
)
"""Overrides by which a launched run changes its layout between its stages, and four processes fit it too."""


UNBROKEN, SAME, OTHER = "unbroken", "same layout", "other layouts"


@dataclass(frozen=True)
class Finding:
    """How a broken run compares with the unbroken one."""

    steps: int
    every_step_once: bool
    same_tokens: bool
    """The stream's hash is the unbroken run's after every step."""
    largest_loss_difference: float
    """Relative, over all steps."""
    identical: bool
    """Losses and gradient norms of all steps, bit for bit."""
    most_lost_steps: int
    most_lost_when_asked: int


def compare(broken: Path, unbroken: Path, outcomes: Sequence[Outcome]) -> Finding:
    """Hold a run that was broken against one that was not."""
    mine, theirs = steps_of(broken), steps_of(unbroken)
    pairs = list(zip(mine, theirs, strict=False))
    figures = ("stage", "step", "loss", "gradient_norm", "learning_rate", "tokens")
    return Finding(
        steps=len(mine),
        every_step_once=[s["step"] for s in mine] == [s["step"] for s in theirs],
        same_tokens=all(a["stream_hash"] == b["stream_hash"] is not None for a, b in pairs),
        largest_loss_difference=max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs),
        identical=all(a[name] == b[name] for a, b in pairs for name in figures),
        most_lost_steps=max((o.lost_steps for o in outcomes), default=0),
        most_lost_when_asked=max(
            (o.lost_steps for o in outcomes if o.moment.kind in LOSE_NOTHING), default=0
        ),
    )


def problems(
    findings: Mapping[str, Finding], interval: int, in_flight: int = 2, identical: Sequence[str] = (SAME,)
) -> list[str]:
    """What comparisons show that must not be; `in_flight`: most steps made while a save is written.

    Runs named in `identical` must be the unbroken one bit for bit.
    """
    found = []
    for name, finding in findings.items():
        if not finding.every_step_once:
            found.append(f"{name}: a step is missing or double")
        if not finding.same_tokens:
            found.append(f"{name}: other tokens were trained on")
        if finding.most_lost_steps > interval + in_flight:
            found.append(f"{name}: {finding.most_lost_steps} steps lost, the interval is {interval}")
        if finding.most_lost_when_asked:
            found.append(
                f"{name}: {finding.most_lost_when_asked} steps lost though the run was asked to stop"
            )
        if name in identical and not finding.identical:
            found.append(f"{name}: loss or gradient norm differs")
        if finding.largest_loss_difference > LOSS_TOLERANCE:
            found.append(f"{name}: loss differs by {finding.largest_loss_difference:.2%}")
    return found


def write_builds(folder: Path) -> dict[str, Path]:
    """A build folder per layout: the same model and programme, planned with other degrees pinned."""
    builds = {}
    for name, (processes, degrees) in LAYOUTS.items():
        pinned = "{" + ", ".join(f"{axis}: {size}" for axis, size in degrees.items()) + "}"
        overrides = (f"cluster.devices_per_node={processes}", f"+training.layout={pinned}")
        builds[name] = write_build(folder / _slug(name), overrides, processes)
    return builds


def write_build(target: Path, overrides: Sequence[str], processes: int) -> Path:
    """Plan the soak's blueprint and build it."""
    from shipway.compiler.compose import compose
    from shipway.compiler.emit.build import build
    from shipway.compiler.pipeline import make_plan
    from shipway.compiler.validate import validate
    from shipway.schemas.plan import Plan

    blueprint, diagnostics = validate(compose(str(BLUEPRINT), tuple(overrides), None))
    plan = make_plan(blueprint) if blueprint is not None else diagnostics
    if not isinstance(plan, Plan):
        raise SystemExit(f"{target.name}: {plan}")
    assert all(stage.layout.world_size == processes for stage in plan.stages), target
    build(plan, target, force=True)
    return target


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; returns 0 when nothing was lost, 1 when something was, 3 when time was up before the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=30, help="over both runs (default: 30)")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--folder", type=Path, help="where to work, and to go on with; by default a new one")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing after this time")
    parser.add_argument("--torchrun", action="store_true", help="start ranks by torchrun, not by fork")
    parser.add_argument("--launch", action="store_true", help="one run, through `shipway launch`")
    parser.add_argument("--out", type=Path, help="default: soak.json or soak-launch.json in bench/results")
    options = parser.parse_args(arguments)
    folder = (options.folder or Path(mkdtemp(prefix="soak-"))).resolve()
    until = time.monotonic() + options.minutes * 60
    soaks = launched_soaks(folder, options) if options.launch else soaks_in_layouts(folder, options)
    for name, soak in soaks.items():
        soak.run.mkdir(parents=True, exist_ok=True)
        while soak.next():
            for outcome in soak.outcomes[-1:]:
                print(f"{name}: {describe(outcome)}", flush=True)
            if time.monotonic() > until:
                soak.close()
                print(f"time is up; go on with --folder {folder}")
                return 3
    return report(soaks, options)


def soaks_in_layouts(folder: Path, options: argparse.Namespace) -> dict[str, Soak]:
    """The unbroken run, and two that are broken, ranks started by this process or by torchrun."""
    builds = write_builds(folder / "build")
    processes = {name: number for name, (number, _) in LAYOUTS.items()}
    start, steps, half = _start(torchrun=options.torchrun), planned_steps(builds), options.moments // 2
    same = draw(half, options.seed, steps, [next(iter(LAYOUTS))])
    other = draw(options.moments - half, options.seed, steps, list(LAYOUTS))
    return {
        UNBROKEN: Soak(folder / "unbroken", builds, processes, [], start),
        SAME: Soak(folder / "same", builds, processes, same, start),
        OTHER: Soak(folder / "other", builds, processes, other, start),
    }


def launched_soaks(folder: Path, options: argparse.Namespace) -> dict[str, Soak]:
    """The unbroken run and the broken one, both launched."""
    from bench.launched import Launcher

    number = next(iter(LAUNCHED.values()))
    overrides = (f"cluster.devices_per_node={number}", *LAUNCHED_STAGES)
    target = folder / "build"
    build = target if (target / "plan.json").exists() else write_build(target, overrides, number)
    builds = dict.fromkeys(LAUNCHED, build)
    kinds = (*KINDS, SUPERVISOR)
    first, by_hand = LAUNCHED
    moments = [
        replace(m, layout=by_hand) if m.number % BY_HAND_EVERY == 0 and m.kind != SUPERVISOR else m
        for m in draw(options.moments, options.seed, planned_steps(builds), [first], kinds)
    ]
    return {
        UNBROKEN: Soak(folder / "runs" / "unbroken", builds, LAUNCHED, [], Launcher()),
        "launched": Soak(folder / "runs" / "broken", builds, LAUNCHED, moments, Launcher()),
    }


def _start(*, torchrun: bool) -> Start:
    from bench.starts import Forked, Torchrun

    return Torchrun if torchrun else Forked


def planned_steps(builds: dict[str, Path]) -> int:
    """Steps of the whole programme."""
    from shipway.runtime.build_folder import read_plan

    return sum(stage.steps for stage in read_plan(next(iter(builds.values()))).stages)


def report(soaks: dict[str, Soak], options: argparse.Namespace) -> int:
    """Compare, write the result, say it; returns the exit code."""
    import torch

    from shipway.runtime.build_folder import read_plan

    out: Path = options.out or RESULT.with_stem("soak-launch" if options.launch else "soak")
    unbroken = soaks[UNBROKEN]
    findings = {
        name: compare(soak.run, unbroken.run, soak.outcomes)
        for name, soak in soaks.items()
        if name != UNBROKEN
    }
    moments = sum(len(soaks[name].moments) for name in findings)
    plan = read_plan(next(iter(unbroken.builds.values())))
    interval = plan.blueprint.training.checkpoints.every_steps
    wrong = problems(findings, interval)
    result = {
        "command": f"python -m bench.soak --moments {moments} --seed {options.seed}"
        + " --torchrun" * options.torchrun
        + " --launch" * options.launch,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "shipway": plan.shipway,
        },
        "machine": f"{os.cpu_count()} CPU cores",
        "blueprint": "bench/blueprints/soak.yaml",
        "checkpoint_every_steps": interval,
        "loss_tolerance_across_layouts": LOSS_TOLERANCE,
        "steps": len(steps_of(unbroken.run)),
        "stream_hash": steps_of(unbroken.run)[-1]["stream_hash"],
        "problems": wrong,
        "findings": {name: asdict(finding) for name, finding in findings.items()},
        "moments": {
            name: [{**asdict(o), "lost_steps": o.lost_steps} for o in soaks[name].outcomes]
            for name in findings
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for name, finding in findings.items():
        print(
            f"{name}: {len(soaks[name].outcomes)} moments, {finding.steps} steps, at most"
            f" {finding.most_lost_steps} steps made again (interval {interval}),"
            f" tokens {'the same' if finding.same_tokens else 'DIFFER'},"
            f" largest difference of a loss {finding.largest_loss_difference:.2g}"
        )
    for problem in wrong:
        print(f"PROBLEM: {problem}")
    print(f"written to {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
