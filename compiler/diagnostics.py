"""How diagnostics are shown: to a person, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shipway.schemas.diagnostics import Diagnostic

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

LONGEST_LINE = 160
LEGAL_SHOWN = 12
FEW = 2
"""Legal values that take no more room than the words which would stand for them."""


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """Whether any of them forbids going on."""
    return any(d.severity == "error" for d in diagnostics)


def ordered(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Errors first, then by place, each once."""

    def rank(d: Diagnostic) -> tuple[object, ...]:
        where = d.where
        if where is None:
            return (d.severity != "error", "", 0, 0, 0)
        name, _, number = where.file.partition("override ")
        place = (name, int(number) if number.isdigit() else 0, where.line or 0, where.column or 0)
        return (d.severity != "error", *place)

    return sorted(dict.fromkeys(diagnostics), key=rank)


def to_json(diagnostics: Sequence[Diagnostic]) -> str:
    """A JSON object with all of them, as `--json` prints it."""
    data = {"diagnostics": [d.model_dump(mode="json") for d in ordered(diagnostics)]}
    return json.dumps(data, indent=2, ensure_ascii=False)


def show(diagnostics: Sequence[Diagnostic], console: Console) -> None:
    """Print each, and a last line that counts them."""
    listed = ordered(diagnostics)
    for diagnostic in listed:
        console.print(as_text(diagnostic), soft_wrap=True)
        console.print()
    errors = sum(d.severity == "error" for d in listed)
    warnings = len(listed) - errors
    counts = [_plural(errors, "error")] if errors else []
    counts += [_plural(warnings, "warning")] if warnings else []
    if counts:
        console.print(", ".join(counts), style="bold red" if errors else "bold yellow")


def as_text(diagnostic: Diagnostic) -> Text:
    """One diagnostic, in the form that compilers use."""
    from rich.text import Text

    colour = "red" if diagnostic.severity == "error" else "yellow"
    text = Text()
    text.append(f"{diagnostic.severity}[{diagnostic.code}]", style=f"bold {colour}")
    text.append(f": {diagnostic.summary}", style="bold")
    where = diagnostic.where
    margin = " " * (len(str(where.line)) if where and where.line else 1)
    if where is not None:
        text.append(f"\n{margin}--> ", style="blue").append(str(where))
        if where.source_line is not None and where.line is not None:
            line, caret = _window(where.source_line, where.column or 1)
            text.append(f"\n{margin} |\n{where.line} | ", style="blue").append(line)
            text.append(f"\n{margin} | ", style="blue").append(caret, style=f"bold {colour}")
    for label, lines in (("because", diagnostic.because), ("legal values", _legal(diagnostic.legal))):
        if lines:
            text.append(f"\n{margin} = {label}: ", style="blue")
            text.append(f"\n{margin}   ".join(lines))
    helps = [part for part in (diagnostic.help, f"shipway explain {diagnostic.code}") if part]
    text.append(f"\n{margin} = help: ", style="blue").append(f"\n{margin}   ".join(helps))
    return text


def _legal(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        return ()
    number = LEGAL_SHOWN if len(values) > LEGAL_SHOWN + FEW else len(values)
    shown, left = ", ".join(values[:number]), len(values) - number
    return (shown + (f" and {left} more" if left > 0 else ""),)


def _window(line: str, column: int) -> tuple[str, str]:
    """The source line and its caret, cut around the column where the line is very long."""
    start = max(0, column - LONGEST_LINE // 2) if len(line) > LONGEST_LINE else 0
    part = line[start : start + LONGEST_LINE]
    before = part[: column - 1 - start]
    # Tabs stay tabs before the caret, so that it stands under what it points at.
    caret = "".join("\t" if char == "\t" else " " * _cells(char) for char in before) + "^"
    return part, caret


def _cells(char: str) -> int:
    from rich.cells import cell_len

    return cell_len(char)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
