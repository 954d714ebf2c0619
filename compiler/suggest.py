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
    begun = [c for key, c in sorted(folded.items()) if len(name) > 2 and key.startswith(_fold(name))]
    close = [folded[match] for match in difflib.get_close_matches(_fold(name), folded, n=limit, cutoff=0.6)]
    inside = [c for key, c in sorted(folded.items()) if len(name) > 2 and _fold(name) in key]
    matches = list(dict.fromkeys([*begun, *close])) or inside
    return tuple(matches[:limit])


def ordered(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """All known names, those nearest to `name` first."""
    first = nearest(name, known)
    return (*first, *(other for other in sorted(set(known)) if other not in first))


def near(name: str, known: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Known names that begin with `name` or differ from it by little; none rather than a far one."""
    folded = {_fold(candidate): candidate for candidate in sorted(set(known), reverse=True)}
    begun = [c for key, c in sorted(folded.items()) if len(name) > 2 and key.startswith(_fold(name))]
    close = difflib.get_close_matches(_fold(name), folded, n=limit, cutoff=0.75)
    return tuple(dict.fromkeys([*begun, *(folded[match] for match in close)]))[:limit]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest name, or nothing."""
    close = nearest(name, known, limit=1)
    return f"Did you mean `{close[0]}`?" if close else ""


def _fold(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")
