"""The nearest name to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Known names that `name` was probably meant to be, nearest first."""
    candidates = sorted(set(known))
    folded: dict[str, str] = {}
    for candidate in candidates:
        folded.setdefault(_fold(candidate), candidate)
    close = difflib.get_close_matches(_fold(name), folded, n=limit, cutoff=0.6)
    matches = [folded[match] for match in close]
    if not matches and len(name) > 2:
        matches = [c for c in candidates if _fold(name) in _fold(c)][:limit]
    return tuple(matches)


def ordered(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """All known names, those nearest to `name` first."""
    first = nearest(name, known)
    return (*first, *(other for other in sorted(set(known)) if other not in first))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest name, or nothing."""
    close = nearest(name, known, limit=1)
    return f"Did you mean `{close[0]}`?" if close else ""


def _fold(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")
