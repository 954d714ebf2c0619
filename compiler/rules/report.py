"""Collects what rules find, with its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shipway.compiler.compose import Composed
from shipway.compiler.documents import Key, KeyPath
from shipway.compiler.provenance import dotted
from shipway.schemas.diagnostics import Diagnostic, Severity


@dataclass
class Report:
    """Diagnostics over one composed blueprint."""

    composed: Composed
    diagnostics: list[Diagnostic] = field(default_factory=list)

    @property
    def has_errors(self) -> bool:
        """Whether any rule is broken."""
        return any(d.severity == "error" for d in self.diagnostics)

    def add(
        self,
        code: str,
        path: KeyPath,
        summary: str,
        *,
        values: dict[KeyPath, Any] | None = None,
        because: tuple[str, ...] = (),
        legal: tuple[Any, ...] = (),
        help_text: str = "",
        severity: Severity = "error",
    ) -> None:
        """Record that the value at `path` breaks a rule; `values` are those that led to it."""
        provenance = self.composed.provenance
        reasons: list[str] = []
        for value_path, value in (values or {}).items():
            reasons.extend(provenance.because(value_path, value))
        reasons.extend(step for step in provenance.trace(path) if step not in reasons)
        self.diagnostics.append(
            Diagnostic(
                code=code,
                severity=severity,
                summary=summary,
                field=dotted(path),
                where=provenance.location(path),
                because=(*because, *reasons),
                legal=tuple(str(value) for value in legal),
                help=help_text,
            )
        )

    def written(self, *path: Key) -> bool:
        """Whether somebody wrote the value, rather than leaving it to its default."""
        return self.composed.provenance.known(path)
