"""shipway calibrate

Measuring is the runtime's, in processes of its own; the curves are fitted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipway.compiler.cli.options import Json, Quiet

if TYPE_CHECKING:
    from shipway.compiler.cli.output import Output
    from shipway.schemas.calibration import Calibration
    from shipway.schemas.cluster import Device
    from shipway.schemas.measurement import Measurements


def command(
    device: Annotated[
        str,
        typer.Argument(
            metavar="DEVICE", help="Name in the device group, such as h200 or cpu.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="Calibration to write.", show_default=False),
    ],
    rows: Annotated[
        Path | None,
        typer.Option("--rows", metavar="FILE", help="Fit these rows, measured before.", show_default=False),
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Devices to measure collectives between.")
    ] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Few small sizes, for a first look.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="What plans call it; by default the file's name.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure this machine, and write the efficiency figures that `plan --calibration` uses."""
    from shipway.compiler.calibrate import calibrate
    from shipway.compiler.cli.output import Output
    from shipway.schemas.plan import canonical_json

    output = Output(as_json=json, quiet=quiet)
    figures = _device(device, output)
    measured = _read(rows, output) if rows else _measure_here(figures, out, processes, quick, name, output)
    result = calibrate(measured, figures)
    output.write(out, canonical_json(result))
    output.note(f"calibration written to {out}: shipway plan BLUEPRINT --calibration {out}")
    output.data(canonical_json(result))
    _show(result, output)


def _device(name: str, output: Output) -> Device:
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.documents import read_document
    from shipway.compiler.groups import SearchPath, our_folder
    from shipway.compiler.suggest import did_you_mean
    from shipway.schemas.cluster import Device

    search = SearchPath((our_folder(),))
    found = search.find(f"device/{name}")
    if found is None:
        known = search.options("device")
        help_text = did_you_mean(name, known) or "Devices: " + ", ".join(known)
        output.refuse("CL002", f"there is no device `{name}`", exit_codes.INVALID, help_text=help_text)
    return Device.from_data(read_document(found).data)


def _measure_here(
    device: Device, out: Path, processes: int, quick: bool, name: str | None, output: Output
) -> Measurements:
    """Measure, or leave where the driver, or else torch, finds no such device on this machine."""
    from shipway.compiler.cli.measuring import gpus_here
    from shipway.compiler.launch.devices import CPU, devices_here

    kind = "cuda" if device.kind == "cpu" else device.kind
    _refuse_others(device, devices_here(kind) if gpus_here(kind) else [CPU], output)
    measured = _measure(out, processes, quick, name, output)
    _refuse_others(device, [measured.environment.device], output)
    return measured


def _refuse_others(device: Device, names: Sequence[str], output: Output) -> None:
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.launch.devices import CPU, is_named

    if any(is_named(device, name) for name in names):
        return
    here = "no GPU that torch can use" if CPU in names else ", ".join(dict.fromkeys(names))
    hide = "hide the GPUs (CUDA_VISIBLE_DEVICES=)" if device.kind == "cpu" else "measure where one is"
    output.refuse(
        "EN001",
        f"a calibration of {device.name} cannot be measured here: this machine has {here}",
        exit_codes.ENVIRONMENT,
        help_text=f"Name the device that is here, {hide}, or fit rows measured there: --rows FILE.",
    )


def _measure(out: Path, processes: int, quick: bool, name: str | None, output: Output) -> Measurements:
    """Run the measuring processes; their rows stay beside the calibration."""
    import subprocess
    import sys

    from shipway.compiler.cli import exit_codes

    rows = out.with_name(f"{out.stem}.rows.json")
    output.write(rows, "")
    arguments = ["-m", "shipway.runtime.calibration.main", "--out", str(rows), "--name", name or out.stem]
    arguments += ["--quick"] if quick else []
    launcher = (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes > 1
        else [sys.executable]
    )
    silence = subprocess.DEVNULL if output.quiet else None
    if subprocess.run([*launcher, *arguments], stderr=silence).returncode:
        output.refuse(
            "EN001",
            "the measuring process failed; what it printed stands above",
            exit_codes.ENVIRONMENT,
            help_text="`shipway doctor` shows what this machine has.",
        )
    return _read(rows, output)


def _read(path: Path, output: Output) -> Measurements:
    from pydantic import ValidationError

    from shipway.compiler.cli import exit_codes
    from shipway.schemas.measurement import Measurements

    try:
        return Measurements.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "error").lower()
        output.refuse("EN001", f"{path} cannot be read: {reason}", exit_codes.ENVIRONMENT)
    except (ValidationError, UnicodeDecodeError):
        output.refuse(
            "CL002",
            f"{path} holds no measured rows",
            exit_codes.INVALID,
            help_text="Name a file that `shipway calibrate` wrote as `NAME.rows.json`.",
        )


def _show(result: Calibration, output: Output) -> None:
    from rich.table import Table

    from shipway.schemas.calibration import Curve

    table = Table("figure", "share of the peak", "half of it at", title=result.name, title_justify="left")
    for field in type(result.efficiency).model_fields:
        value = getattr(result.efficiency, field)
        if isinstance(value, Curve):
            table.add_row(field.replace("_", " "), f"{value.ceiling:.3f}", f"{value.half:,.0f}")
    output.show(table)
