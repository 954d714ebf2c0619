"""What `plan`, `show`, `build` and `launch` share: from a blueprint or a plan file to a plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from shipway.compiler.cli import exit_codes
from shipway.compiler.cli.output import Output
from shipway.compiler.cli.planner import Asked, Planner, planner
from shipway.compiler.compose import Composed, compose
from shipway.compiler.diagnostics import has_errors
from shipway.compiler.frozen import frozen
from shipway.compiler.validate import validate
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.diagnostics import Diagnostic, Location
from shipway.schemas.plan import Plan, content_hash

if TYPE_CHECKING:
    from shipway.schemas.calibration import Calibration
    from shipway.schemas.cluster import Device

CONFIG_DIR = "--config-dir="


@frozen
class Read:
    """A valid blueprint with how it was asked for."""

    blueprint: Blueprint
    composed: Composed
    origin: tuple[str, ...]
    warnings: list[Diagnostic]


def read_blueprint(
    name: str, overrides: Sequence[str] | None, config_dir: Path | None, output: Output
) -> Read:
    """Compose and validate, or leave with all mistakes."""
    composed = compose(name, tuple(overrides or ()), config_dir)
    blueprint, diagnostics = validate(composed)
    if blueprint is None:
        output.fail(diagnostics)
    extra = (f"{CONFIG_DIR}{config_dir}",) if config_dir is not None else ()
    return Read(blueprint, composed, (*composed.origin, *extra), diagnostics)


def plan_blueprint(read: Read, make: Planner, output: Output, figures: Calibration | None = None) -> Plan:
    """Plan, or leave with why nothing fits; `figures` in place of the device's own calibration."""
    check_calibration(figures, read.blueprint.cluster.device, output)
    path = read.composed.path
    folder = str(path.parent.absolute()) if path else ""
    made = make(Asked(read.blueprint, read.origin, folder, figures), output.prepare)
    if isinstance(made, list):
        unfit = any(d.code.startswith("PL") for d in made)
        status = exit_codes.NOTHING_FITS if unfit else exit_codes.INVALID
        output.fail([*_placed(made, read), *read.warnings], status)
    return made


def read_calibration(path: Path | None, output: Output) -> Calibration | None:
    """The figures in a file of `shipway calibrate`, if any is given, or leave with what is wrong with it."""
    if path is None:
        return None
    from shipway.schemas.calibration import Calibration

    try:
        return Calibration.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "error").lower()
        output.refuse("CL001", f"{path} cannot be read: {reason}", exit_codes.INVALID)
    except (ValidationError, UnicodeDecodeError):
        output.refuse(
            "CL001",
            f"{path} is no calibration",
            exit_codes.INVALID,
            help_text="Make one with `shipway calibrate DEVICE --out FILE`.",
        )


def check_calibration(figures: Calibration | None, device: Device, output: Output) -> None:
    """Leave when the figures were measured on a CPU for a plan on GPUs, or the other way round; warn where
    they are another GPU's, which may be as near as there are."""
    if figures is None or figures.environment is None:
        return
    from shipway.compiler.launch.devices import CPU, is_named

    name = figures.environment.device
    if is_named(device, name):
        return
    wrong = CPU in (device.kind, name)
    diagnostic = Diagnostic(
        code="CL004",
        severity="error" if wrong else "warning",
        summary=f"the calibration {figures.name} is of {name}, and the plan is for {device.name}",
        help="Plan without --calibration, or measure there: `shipway calibrate DEVICE --out FILE`.",
    )
    if wrong:
        output.fail([diagnostic])
    output.warn([diagnostic])


def _placed(diagnostics: Sequence[Diagnostic], read: Read) -> list[Diagnostic]:
    """Give the planner's diagnostics the place of the field that they are about."""
    from shipway.compiler.provenance import dotted, parse_path
    from shipway.compiler.rules.layout import written_at

    placed = []
    for diagnostic in diagnostics:
        path = parse_path(diagnostic.field)
        if path[:2] == ("training", "stages") and len(path) > 2 and isinstance(path[2], int):
            path = written_at(read.blueprint, path[2], diagnostic.field)
        where = diagnostic.where or read.composed.provenance.location(path)
        placed.append(diagnostic.model_copy(update={"field": dotted(path), "where": where}))
    return placed


def is_plan_file(name: str) -> bool:
    """Whether an argument names a plan file or a build folder, rather than a blueprint."""
    path = Path(name)
    return (path.is_file() and path.suffix == ".json") or (path / "plan.json").is_file()


def load_plan(name: str, output: Output) -> Plan:
    """The plan in a file or a build folder, or leave with what is wrong with it."""
    path = Path(name)
    path = path / "plan.json" if path.is_dir() else path
    help_text = "Make it anew with `shipway plan NAME --out FILE`."
    if Path(name).is_dir():
        help_text = f"Write it anew: shipway build BLUEPRINT --out {shlex.quote(name)} --force"
    try:
        text = path.read_text(encoding="utf-8")
        plan = Plan.model_validate_json(text)
    except OSError as error:
        reason = (error.strerror or "error").lower()
        output.refuse("PL011", f"{path} cannot be read: {reason}", exit_codes.INVALID, help_text=help_text)
    except (ValidationError, UnicodeDecodeError) as error:
        output.refuse(
            "PL011", _not_a_plan(path, error), exit_codes.INVALID, file=str(path), help_text=help_text
        )
    if plan.hash != plan.sealed().hash:
        summary = "the plan does not match its own hash: it was edited or cut"
        if Path(name).is_dir() and plan.origin:
            help_text = f"Change the blueprint, then write it anew: {build_again(plan, Path(name))} --force"
        output.refuse("PL011", summary, exit_codes.INVALID, file=str(path), help_text=help_text)
    return plan


def _not_a_plan(path: Path, error: ValidationError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"{path.name} is not valid JSON: it is not UTF-8 text"
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        detail = str((first.get("ctx") or {}).get("error", first["msg"]))
        return f"{path.name} is not valid JSON: {detail}"
    place = ".".join(map(str, first["loc"]))
    detail = f"{place}: {first['msg']}" if place else first["msg"]
    if first["loc"] and _names_a_hash(error):
        return f"{path.name} is not a plan of this version ({detail[:1].lower() + detail[1:]})"
    return f"{path.name} is not a plan ({detail[:1].lower() + detail[1:]})"


def _names_a_hash(error: ValidationError) -> bool:
    """Whether what was read has the fields that every version of a plan has."""
    missing = {item["loc"] for item in error.errors(include_url=False) if item["type"] == "missing"}
    return not missing & {("hash",), ("blueprint_hash",)}


def plan_source(
    source: str,
    overrides: Sequence[str] | None,
    config_dir: Path | None,
    output: Output,
    figures: Calibration | None = None,
) -> Plan:
    """The plan of a plan file, which must be current, or of a blueprint, which is planned now."""
    if Path(source).suffix == ".json" and not Path(source).exists():
        help_text = "`shipway plan BLUEPRINT --out FILE` writes one."
        output.refuse("PL011", f"there is no plan file {source}", exit_codes.INVALID, help_text=help_text)
    if is_plan_file(source):
        if overrides:
            summary = "a plan is frozen, so overrides cannot change it"
            output.refuse("CL001", summary, exit_codes.INVALID, help_text="Give them to `shipway plan`.")
        plan = load_plan(source, output)
        refuse_stale(plan, output, Path(source))
        return plan
    with planner() as make:
        read = read_blueprint(source, overrides, config_dir, output)
        if not output.as_json:
            output.warn(read.warnings)
        return plan_blueprint(read, make, output, figures)


def build_again(plan: Plan, folder: Path) -> str:
    """The command that makes a build folder of this plan's blueprint anew."""
    return shlex.join(["shipway", "build", *plan.origin, "--out", str(folder)])


def refuse_stale(plan: Plan, output: Output, place: Path) -> None:
    """Leave with status 5 when the blueprint has changed since the plan in `place` was made."""
    if not plan.origin:
        output.note(
            "The plan does not say which blueprint it was made from, so nothing checks that it is current."
        )
        return
    name, *rest = plan.origin
    folders = [Path(text.removeprefix(CONFIG_DIR)) for text in rest if text.startswith(CONFIG_DIR)]
    overrides = [text for text in rest if not text.startswith(CONFIG_DIR)]
    composed = compose(name, overrides, folders[0] if folders else None)
    if composed.path is None:
        output.note(f"The blueprint {name} is not here, so nothing checks that the plan is current.")
        return
    blueprint, diagnostics = validate(composed)
    if place.is_dir():
        again = f"Build again: {build_again(plan, place)} (with --force where you have edited its files)"
    else:
        again = f"Plan again: {shlex.join(['shipway', 'plan', *plan.origin, '--out', str(place)])}"
    if blueprint is None:
        stale = _stale(f"the blueprint {name} is not valid any more", name, again, ())
        output.fail([stale, *(d for d in diagnostics if d.severity == "error")], exit_codes.STALE)
    if content_hash(blueprint) != plan.blueprint_hash:
        changes = tuple(_changes(plan.blueprint, blueprint))
        summary = f"the blueprint {name} has changed since this plan was made"
        output.fail([_stale(summary, name, again, changes)], exit_codes.STALE)


def _stale(summary: str, name: str, again: str, changes: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        code="PL010",
        summary=summary,
        where=Location(file=name),
        because=changes[:8],
        help=again,
    )


def _changes(old: Blueprint, new: Blueprint) -> list[str]:
    from shipway.compiler.plan_diff import differences

    found = differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    return [change.words() for change in found]


def warnings_json(diagnostics: Sequence[Diagnostic]) -> list[object]:
    """Warnings as data."""
    assert not has_errors(diagnostics)
    return [json.loads(d.model_dump_json()) for d in diagnostics]
