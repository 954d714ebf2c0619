"""shipway plan"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipway.compiler.cli.options import CalibrationFile, ConfigDir, Json, Name, Overrides, Quiet

if TYPE_CHECKING:
    from shipway.compiler.cli.output import Output
    from shipway.compiler.cli.planner import Planner
    from shipway.compiler.cli.planning import Read
    from shipway.schemas.calibration import Calibration
    from shipway.schemas.layout import LayoutConstraints
    from shipway.schemas.plan import Plan


def command(
    context: typer.Context,
    name: Name,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the plan to a file.", show_default=False),
    ] = None,
    diff: Annotated[
        Path | None,
        typer.Option(
            "--diff", metavar="OLD", help="Show what changed since an older plan.", show_default=False
        ),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="With --diff: leave with status 6 when something changed.")
    ] = False,
    dump_after: Annotated[
        str | None,
        typer.Option("--dump-after", metavar="PASS", help="Print what a pass has made.", show_default=False),
    ] = None,
    calibration: CalibrationFile = None,
    serving: Annotated[
        bool, typer.Option("--serving", help="Capacity of serving the model on this cluster instead.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write the predicted step as a Perfetto trace.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write the plan as a page with figures.", show_default=False
        ),
    ] = None,
    why: Annotated[
        str | None,
        typer.Option(
            "--why",
            metavar="LAYOUT",
            help='Say why no stage has this layout, such as "tp=8, pp=4" or "PP4 TP8".',
            show_default=False,
        ),
    ] = None,
    config_dir: ConfigDir = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Plan a blueprint: parameters, layout, memory, time and cost of every stage."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.output import Output

    output = Output(as_json=json, quiet=quiet)
    if exit_code and diff is None:
        output.refuse("CL001", "--exit-code says what --diff found: give --diff too", exit_codes.INVALID)
    asked = _asked(why, diff is not None, output) if why is not None and not serving else None
    old = _old(diff, output) if diff is not None and not serving else None
    if dump_after is not None:
        _dump(name, overrides, config_dir, dump_after, output)
        return
    if serving:
        if diff or trace or html or why:
            summary = "--serving plans no training: --diff, --trace, --html and --why have nothing to show"
            output.refuse("CL001", summary, 2)
        _serving(name, overrides, config_dir, calibration, out, output)
        return
    read, figures, plan = _planned(context.obj, name, overrides, config_dir, calibration, output)
    from shipway.schemas.plan import canonical_json

    if out is not None:
        output.write(out, canonical_json(plan))
        output.note(f"plan written to {out}")
    _write_pictures(plan, figures, trace, html, output)
    if not json:
        output.warn(read.warnings)
    if asked is not None:
        _explain_loss(plan, asked, figures, output)
        return
    if old is not None:
        changed = _show_difference(old, plan, output)
        if changed and exit_code:
            from shipway.compiler.cli.exit_codes import DIFFERENT

            raise typer.Exit(DIFFERENT)
        return
    if json:
        output.data(canonical_json(plan))  # takes as long as a table: only for who asks
    elif not quiet:
        from shipway.compiler.render.plan import render_plan

        output.show(render_plan(plan))


def _old(diff: Path, output: Output) -> Plan:
    from shipway.compiler.cli.planning import load_plan

    return load_plan(str(diff), output)


def _planned(
    loading: Planner | None,
    name: str,
    overrides: list[str] | None,
    config_dir: Path | None,
    calibration: Path | None,
    output: Output,
) -> tuple[Read, Calibration | None, Plan]:
    """The blueprint, the figures that were given, and the plan; the planner loads beside all that reads."""
    from shipway.compiler.cli.planner import planner

    with nullcontext(loading) if loading else planner() as make:
        from shipway.compiler.cli.planning import plan_blueprint, read_blueprint, read_calibration

        read = read_blueprint(name, overrides, config_dir, output)
        figures = read_calibration(calibration, output)
        return read, figures, plan_blueprint(read, make, output, figures)


def _asked(text: str, with_diff: bool, output: Output) -> LayoutConstraints:
    """The layout that `--why` asks about, or leave with what is wrong with it."""
    from shipway.compiler.asked_layout import read_layout
    from shipway.schemas.diagnostics import Diagnostic

    if with_diff:
        output.refuse("CL001", "--why and --diff answer different questions: give one of them", 2)
    read = read_layout(text, "--why")
    if isinstance(read, Diagnostic):
        output.fail([read])
    return read


def _explain_loss(plan: Plan, asked: LayoutConstraints, figures: Calibration | None, output: Output) -> None:
    from shipway.compiler.render.why import render_why, why_json
    from shipway.compiler.why import why

    answers = why(plan, asked, figures)
    output.data(why_json(asked, answers))
    output.show(render_why(answers))


def _write_pictures(
    plan: Plan, figures: Calibration | None, trace: Path | None, html: Path | None, output: Output
) -> None:
    if trace is not None:
        from shipway.compiler.trace import trace_json

        output.write(trace, trace_json(plan, figures))
        output.note(f"trace written to {trace}")
    if html is not None:
        from shipway.compiler.report_html import report_html

        output.write(html, report_html(plan, figures))
        output.note(f"report written to {html}")


def _serving(
    name: str,
    overrides: list[str] | None,
    config_dir: Path | None,
    calibration: Path | None,
    out: Path | None,
    output: Output,
) -> None:
    from shipway.compiler.cli.planning import check_calibration, read_blueprint, read_calibration
    from shipway.compiler.render.serving import render_serving
    from shipway.compiler.serving import serving
    from shipway.schemas.plan import canonical_json

    read = read_blueprint(name, overrides, config_dir, output)
    figures = read_calibration(calibration, output)
    check_calibration(figures, read.blueprint.cluster.device, output)
    capacity = serving(read.blueprint, figures)
    if out is not None:
        output.write(out, canonical_json(capacity))
        output.note(f"serving capacity written to {out}")
    output.data(canonical_json(capacity))
    output.show(render_serving(capacity))


def _dump(
    name: str, overrides: list[str] | None, config_dir: Path | None, wanted: str, output: Output
) -> None:
    from shipway.compiler.cli.planning import read_blueprint
    from shipway.compiler.compose import compose
    from shipway.compiler.dump import PASSES, dump_composed, dump_pass
    from shipway.compiler.suggest import did_you_mean, ordered
    from shipway.schemas.diagnostics import Diagnostic

    if wanted not in PASSES:
        diagnostic = Diagnostic(
            code="CL002",
            summary=f"there is no pass named `{wanted}`",
            legal=ordered(wanted, PASSES),
            help=did_you_mean(wanted, PASSES) or "Passes in order: " + ", ".join(PASSES),
        )
        output.fail([diagnostic])
    if wanted == "compose":
        composed = compose(name, tuple(overrides or ()), config_dir)
        if not composed.complete:
            output.fail(composed.diagnostics)
        output.text(dump_composed(composed))
        return
    read = read_blueprint(name, overrides, config_dir, output)
    output.text(dump_pass(wanted, read.blueprint, read.origin))


def _show_difference(old: Plan, new: Plan, output: Output) -> bool:
    from rich.text import Text

    from shipway.compiler.plan_diff import plan_differences

    changes = plan_differences(old, new)
    output.data({"changes": [change.data() for change in changes]})
    styles = {"+": "green", "~": "yellow", "-": "red"}
    for change in changes:
        output.show(Text(change.words(), style=styles[change.sign]))
    counts = {sign: sum(change.sign == sign for change in changes) for sign in "+~-"}
    output.show(
        f"{counts['+']} added, {counts['~']} changed, {counts['-']} removed" if changes else "No difference."
    )
    return bool(changes)
