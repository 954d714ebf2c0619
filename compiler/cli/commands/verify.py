"""shipway verify"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipway.compiler.cli.options import CalibrationFile, ConfigDir, Json, Overrides, Quiet

if TYPE_CHECKING:
    from shipway.compiler.campaign import Draw
    from shipway.compiler.cli.output import Output
    from shipway.compiler.verify import Comparison
    from shipway.schemas.calibration import Calibration
    from shipway.schemas.cluster import Cluster
    from shipway.schemas.plan import Plan, StagePlan
    from shipway.schemas.verification import StageReading


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|BLUEPRINT",
            help="What to verify; with --campaign, the blueprint whose cluster is drawn for.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="NAME", help="Stage to run; by default the first.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to measure, after a warm-up.")] = 5,
    documents: Annotated[
        bool,
        typer.Option(
            "--documents",
            help="Keep the data's document boundaries; by default every sequence is one document.",
        ),
    ] = False,
    holders: Annotated[
        bool, typer.Option("--holders", help="Say which lines of code hold the memory at the peak; slow.")
    ] = False,
    campaign: Annotated[
        int | None,
        typer.Option("--campaign", min=1, metavar="N", help="Verify N random blueprints instead."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="With --campaign: what the draws come from.")] = 0,
    near_limit: Annotated[
        bool, typer.Option("--near-limit", help="With --campaign: draws that nearly fill the device.")
    ] = False,
    calibration: CalibrationFile = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write planned and measured.", show_default=False),
    ] = None,
    config_dir: ConfigDir = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a few steps on the devices at hand, and set what was measured beside what was planned."""
    from tempfile import TemporaryDirectory

    from shipway.compiler.cli.output import Output
    from shipway.compiler.cli.planning import plan_source, read_calibration

    output = Output(as_json=json, quiet=quiet)
    figures = read_calibration(calibration, output)
    with TemporaryDirectory(prefix="shipway-verify-") as folder:
        if campaign is None:
            plan = plan_source(source, overrides, config_dir, output, figures)
            plans = {_build(plan, Path(folder) / plan.name, output): plan}
        else:
            draws = _draws(source, overrides, config_dir, figures, campaign, seed, near_limit, output)
            plans = {_build(d.plan, Path(folder) / d.plan.name, output): d.plan for d in draws}
        comparisons = _measure(plans, stage, steps, documents, holders, Path(folder), out, output)
        _tell(comparisons, plans, campaign is not None, output)
    if out is not None:
        output.note(f"planned and measured written to {out}")


def _draws(
    source: str,
    overrides: list[str] | None,
    config_dir: Path | None,
    figures: Calibration | None,
    number: int,
    seed: int,
    near_limit: bool,
    output: Output,
) -> list[Draw]:
    from shipway.compiler.campaign import LONGEST_STEP_SECONDS, draw
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.planning import check_calibration, read_blueprint
    from shipway.compiler.render import units

    cluster: Cluster = read_blueprint(source, overrides, config_dir, output).blueprint.cluster
    check_calibration(figures, cluster.device, output)
    drawn = (draw(seed, index, cluster, near_limit, figures) for index in range(number))
    found = [each for each in drawn if each is not None]
    if not found:
        device = cluster.device
        fits = "nearly fills" if near_limit else "fits"
        output.refuse(
            "PL001",
            f"nothing could be drawn for {cluster.name} that {fits} the {units.gibibytes(device.memory)} "
            f"of a {device.name} and steps in {LONGEST_STEP_SECONDS} s",
            exit_codes.NOTHING_FITS,
            help_text="A campaign draws models of some hundred million parameters and more: name a cluster "
            "of larger devices, such as cluster=h200_1, or verify this blueprint, without --campaign.",
        )
    output.note(f"{len(found)} blueprints drawn for {cluster.name} from seed {seed}")
    return found


def _build(plan: Plan, folder: Path, output: Output) -> Path:
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.emit.build import build

    built = build(plan, folder)
    if isinstance(built, list):
        output.fail(built, exit_codes.ENVIRONMENT)
    return built.folder


def _measure(
    plans: dict[Path, Plan],
    stage: str | None,
    steps: int,
    documents: bool,
    holders: bool,
    folder: Path,
    out: Path | None,
    output: Output,
) -> list[Comparison]:
    """Planned beside measured of all builds, those of as many devices together; `out` grows with them."""
    from json import dumps

    from shipway.compiler.cli.measuring import Job, measure
    from shipway.compiler.render.verify import line
    from shipway.compiler.verify import compare

    by_world: dict[int, list[Path]] = {}
    for path, plan in plans.items():
        by_world.setdefault(_stage(plan, stage, output).devices_used, []).append(path)
    gpus = _gpus(plans, max(by_world), output)
    found: list[Comparison] = []

    def tell(reading: StageReading) -> None:
        path = Path(reading.build)
        found.append(compare(_stage(plans[path], stage, output), reading))
        output.note(f"{path.name}: {line(found[-1])}")
        if out is not None:
            output.write(out, dumps(_data(found, plans), indent=1) + "\n")

    for world, builds in sorted(by_world.items()):
        measure(Job(tuple(builds), world, gpus, stage, steps, documents, holders), folder, tell)
    return sorted(found, key=lambda comparison: comparison.reading.build)


def _gpus(plans: dict[Path, Plan], world: int, output: Output) -> tuple[str, ...]:
    """GPUs of this machine, which must be `world` at least; none where the plans are for a CPU."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.measuring import gpus_here

    device = next(iter(plans.values())).blueprint.cluster.device
    if device.kind == "cpu":
        return ()
    here = gpus_here(device.kind)
    if len(here) < world:
        output.refuse(
            "EN001",
            f"the plan uses {world} {device.name}, and this machine has {len(here) or 'no'} GPUs",
            exit_codes.ENVIRONMENT,
            help_text="Run `shipway verify` where they are, or plan for what is here: cluster=h200_1.",
        )
    return here


def _stage(plan: Plan, name: str | None, output: Output) -> StagePlan:
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.suggest import did_you_mean

    names = [stage.name for stage in plan.stages]
    if name is not None and name not in names:
        help_text = did_you_mean(name, names) or "Stages: " + ", ".join(names)
        output.refuse("CL002", f"the plan has no stage `{name}`", exit_codes.INVALID, help_text=help_text)
    return next(stage for stage in plan.stages if name in (None, stage.name))


def _tell(comparisons: list[Comparison], plans: dict[Path, Plan], campaign: bool, output: Output) -> None:
    from collections import Counter

    from shipway.compiler.cli import exit_codes
    from shipway.compiler.render.verify import render_comparison, render_spreads
    from shipway.compiler.verify import spreads

    output.data(_data(comparisons, plans))
    false_fits = sum(comparison.false_fit for comparison in comparisons)
    if campaign:
        outcomes: Counter[str] = Counter(comparison.reading.outcome for comparison in comparisons)
        output.show(render_spreads(spreads(comparisons), outcomes, false_fits))
    else:
        output.show(*(render_comparison(comparison) for comparison in comparisons))
    if false_fits or not any(c.reading.outcome == "measured" for c in comparisons):
        raise typer.Exit(exit_codes.INTERNAL)


def _data(comparisons: list[Comparison], plans: dict[Path, Plan]) -> dict[str, object]:
    from dataclasses import asdict
    from datetime import date

    from shipway.compiler.verify import spreads

    return {
        "date": date.today().isoformat(),
        "spreads": [asdict(spread) for spread in spreads(comparisons)],
        "false_fits": sum(comparison.false_fit for comparison in comparisons),
        "cases": [_case(c, plans[Path(c.reading.build)]) for c in comparisons],
    }


def _case(comparison: Comparison, plan: Plan) -> dict[str, object]:
    reading = comparison.reading
    return {
        "name": plan.name,
        "model": plan.blueprint.model.model_dump(mode="json"),
        "stages": [s.model_dump(mode="json", exclude_none=True) for s in plan.blueprint.training.stages],
        "optimizer": plan.blueprint.training.optimizer.kind,
        "calibration": plan.calibration,
        "verdict": comparison.verdict,
        "totals": [term.data() for term in comparison.totals],
        "parts": [term.data() for term in comparison.parts],
        "reading": reading.model_dump(mode="json", exclude={"build"}),
    }
