"""Diagnostics: what is wrong, where, why, and what to do. Values that are collected, never raised."""

from typing import Literal

from shipway.schemas.base import Schema

Severity = Literal["error", "warning"]


class Location(Schema):
    """Where a value came from."""

    file: str
    """Path as the user would type it, or `override` or `default`."""
    line: int | None = None
    """One-based line."""
    column: int | None = None
    """One-based column."""
    source_line: str | None = None
    """The offending line, or the override as typed."""

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)


class Diagnostic(Schema):
    """One mistake or warning."""

    code: str
    """Code that `shipway explain` knows, such as BP021."""
    severity: Severity = "error"
    summary: str
    """What is wrong, in one line and in the user's words."""
    field: str = ""
    """Dotted path of the value, such as training.stages.0.context."""
    where: Location | None = None
    """Where the value stands."""
    because: tuple[str, ...] = ()
    """The values that led here, and where each came from."""
    legal: tuple[str, ...] = ()
    """Legal values, nearest first."""
    help: str = ""
    """What to do."""
