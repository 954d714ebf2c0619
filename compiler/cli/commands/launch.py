"""shipway launch"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipway.compiler.cli.options import ConfigDir, Json, Overrides, Quiet
from shipway.compiler.cli.starting import Wait, start_run

if TYPE_CHECKING:
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch.launch import Launch


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|PLAN|BLUEPRINT",
            help="A build folder, or a plan or blueprint to build first.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")
    ] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Start a new run, rather than continue this build's unfinished one.")
    ] = False,
    wait: Wait = False,
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of the runs.")] = Path("runs"),
    config_dir: ConfigDir = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train: start a build on the cluster that its blueprint names, or continue where it stopped."""
    from shipway.compiler.cli.finding import find_run, refuse_unless_at_rest
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch import launch as launching

    output = Output(as_json=json, quiet=quiet)
    folder = _folder(source, overrides, config_dir, output)
    ready = launching.dry_run(folder, runs, new=new) if dry_run else launching.prepare(folder, runs, new=new)
    if isinstance(ready, launching.Refusal):
        output.fail(ready.diagnostics, ready.code)
    output.warn(ready.warnings)
    words: list[dict[str, object]] = [
        {
            "purpose": c.purpose,
            "command": list(c.arguments),
            "environment": dict(c.environment),
            "stdin": c.stdin,
        }
        for c in ready.commands
    ]
    if dry_run:
        if ready.continues:
            _refuse_if_led_here(ready, runs, output)
        run = {"run": ready.run.id, "folder": str(ready.run.folder), "continues": ready.continues}
        output.data({**run, "commands": words})
        if not json:
            _print_commands(words, output)
        return
    if ready.continues:
        found = find_run(str(ready.run.folder), runs, output)
        if refuse_unless_at_rest(found, output, or_new=True) == "done":  # by the cluster's word alone
            ready = launching.prepare(folder, runs, new=True)
            if isinstance(ready, launching.Refusal):
                output.fail(ready.diagnostics, ready.code)
    verb = "continuing" if ready.continues else "starting"
    output.note(f"{verb} run {ready.run.id} in {ready.run.folder}")
    start_run(ready, output, wait=wait)


def _folder(source: str, overrides: list[str] | None, config_dir: Path | None, output: Output) -> Path:
    """The build folder: the one named, or the one built from a plan or a blueprint."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.building import build_source
    from shipway.compiler.cli.planning import load_plan, refuse_stale
    from shipway.compiler.emit.manifest import MANIFEST
    from shipway.compiler.launch.intact import missing_files

    path = Path(source)
    if (path / "plan.json").is_file():
        if overrides:
            summary = "a build is frozen, so overrides cannot change it"
            output.refuse("CL001", summary, exit_codes.INVALID, help_text="Give them to `shipway plan`.")
        refuse_stale(load_plan(source, output), output, path)
        return path
    if (path / MANIFEST).is_file():
        output.fail(missing_files(path, "shipway build BLUEPRINT"), exit_codes.ENVIRONMENT)
    if path.is_dir():
        summary = f"{source} is no build folder: it has no plan.json"
        output.refuse("EN002", summary, exit_codes.ENVIRONMENT, help_text="Write one with `shipway build`.")
    if not path.suffix and not path.exists():
        _refuse_unless_blueprint(source, config_dir, output)
    built = build_source(source, overrides, config_dir, None, False, output)
    output.note(f"built {built.folder}")
    return built.folder


def _refuse_unless_blueprint(source: str, config_dir: Path | None, output: Output) -> None:
    """Leave when what is named is no build folder, and no blueprint either."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.building import BUILDS
    from shipway.compiler.groups import SearchPath, our_folder
    from shipway.compiler.suggest import did_you_mean

    search = SearchPath((*([config_dir] if config_dir is not None else []), our_folder()))
    if "/" in source:
        summary, help_text = f"there is no build folder {source}", ""
    elif search.find(source) is None:
        summary = f"there is no build folder {source}, and no blueprint of this name"
        help_text = did_you_mean(source, search.options(""))
        if (BUILDS / source / "plan.json").is_file():
            help_text = f"Did you mean the build folder `{BUILDS / source}`?"
    else:
        return
    help_text = help_text or "`shipway build BLUEPRINT` writes one."
    output.refuse("EN002", summary, exit_codes.ENVIRONMENT, help_text=help_text)


def _refuse_if_led_here(ready: Launch, runs: Path, output: Output) -> None:
    """Leave when nothing would start, as the run goes on; a scheduler is not asked by a dry run."""
    from shipway.compiler.cli.finding import find_run, refuse_unless_at_rest

    found = find_run(str(ready.run.folder), runs, output)
    if not found.target.status(found.record):
        refuse_unless_at_rest(found, output, or_new=True)


def _print_commands(words: list[dict[str, object]], output: Output) -> None:
    import shlex

    for entry in words:
        output.text(f"# {entry['purpose']}")
        environment = entry["environment"]
        assert isinstance(environment, dict)
        settings = [f"{name}={shlex.quote(str(value))}" for name, value in environment.items()]
        arguments = entry["command"]
        assert isinstance(arguments, list)
        line = " ".join([*settings, *(shlex.quote(str(word)) for word in arguments)])
        stdin = str(entry["stdin"])
        output.text(f"{line} <<'EOF'\n{stdin.rstrip()}\nEOF" if stdin else line)
