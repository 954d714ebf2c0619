"""What commands print: data on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from shipway.compiler.cli import exit_codes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from shipway.schemas.diagnostics import Diagnostic

PLAIN_WIDTH = 120
"""Columns where output is no terminal: a log or a pipe should not depend on a window."""


class Output:
    """The two streams of one command."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet

    @property
    def console(self) -> Console:
        """Standard output, for people; rich heeds NO_COLOR and whether it is a terminal."""
        return _console(stderr=False)

    @property
    def log(self) -> Console:
        """Standard error."""
        return _console(stderr=True)

    def prepare(self) -> None:
        """Load what shows a plan to a person, where there is time before there is one."""
        if not self.as_json and not self.quiet:
            import shipway.compiler.render.plan  # noqa: F401

    def show(self, *parts: RenderableType) -> None:
        """Print for a person, unless JSON or silence is asked for."""
        if not self.as_json and not self.quiet:
            for part in parts:
                _print(self.console, part)

    def text(self, text: str) -> None:
        """Print text that is the command's result, as it is."""
        sys.stdout.write(text if text.endswith("\n") else text + "\n")

    def data(self, value: Any) -> None:
        """Print data when JSON is asked for."""
        if self.as_json:
            self.text(value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False))

    def note(self, text: str) -> None:
        """Say what is going on, on standard error."""
        if not self.quiet:
            self.log.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def warn(self, diagnostics: Sequence[Diagnostic]) -> None:
        """Print warnings on standard error."""
        from shipway.compiler.diagnostics import show

        if diagnostics and not self.quiet:
            show(diagnostics, self.log)

    def fail(self, diagnostics: Sequence[Diagnostic], status: int = exit_codes.INVALID) -> NoReturn:
        """Print what is wrong and leave with `status`."""
        from shipway.compiler.diagnostics import show, to_json

        if self.as_json:
            self.text(to_json(diagnostics))
        else:
            shown = [d for d in diagnostics if d.severity == "error"] if self.quiet else diagnostics
            show(shown, self.log)
        raise typer.Exit(status)

    def refuse(
        self, code: str, summary: str, status: int, *, file: str = "", help_text: str = ""
    ) -> NoReturn:
        """Leave with one diagnostic."""
        from shipway.schemas.diagnostics import Diagnostic, Location

        where = Location(file=file) if file else None
        self.fail([Diagnostic(code=code, summary=summary, where=where, help=help_text)], status)

    def write(self, path: Path, text: str) -> None:
        """Write a file, or leave with a diagnostic where that is not possible."""
        self.write_all({path: text})

    def write_all(self, texts: Mapping[Path, str]) -> None:
        """Write files, all or none, or leave with a diagnostic where that is not possible."""
        from shipway.compiler.writing import write_files

        try:
            write_files(texts)
        except OSError as error:
            reason = (error.strerror or "error").lower()
            names = " and ".join(map(str, texts))
            self.refuse("EN003", f"{names} cannot be written: {reason}", exit_codes.ENVIRONMENT)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _plain_width(), highlight=False)


def _plain_width() -> int:
    """Columns where output is no terminal: COLUMNS where it is set."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else PLAIN_WIDTH


def _print(console: Console, part: RenderableType) -> None:
    """Print; where no terminal reads, without the spaces that tables fill their last column with."""
    if console.is_terminal:
        console.print(part)
        return
    with console.capture() as capture:
        console.print(part)
    console.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
