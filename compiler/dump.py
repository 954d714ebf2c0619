"""What each pass has made, as text: `plan --dump-after=PASS`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from shipway.compiler.compose import Composed
from shipway.compiler.provenance import dotted, shown
from shipway.schemas.base import Schema
from shipway.schemas.blueprint import Blueprint

PASSES = ("compose", "validate", "lower", "fabric", "enumerate", "search", "sequence", "assemble", "seal")
"""As `compiler/pipeline.py` lists them; a test holds the two together."""

DEEPEST = 6


def dump_composed(composed: Composed) -> str:
    """Every value of the composed blueprint with its place."""
    lines = []
    for path, value in _leaves(composed.data, ()):
        origin = composed.provenance.origin(path)
        reference = f" = {origin.reference}" if origin.reference else ""
        lines.append(f"{dotted(path)}: {shown(value)}  # {origin.value}{reference}")
    return "\n".join(lines)


def dump_pass(wanted: str, blueprint: Blueprint, origin: tuple[str, ...]) -> str:
    """What pass `wanted` makes of a valid blueprint."""
    from shipway.compiler.pipeline import make_plan

    seen: dict[str, object] = {}
    made = make_plan(blueprint, origin, dump=seen.__setitem__)
    seen.setdefault("seal", made)
    if wanted not in seen:
        return f"planning ended before the pass `{wanted}`\n{_text(made)}"
    return _text(seen[wanted])


def _text(value: object) -> str:
    return json.dumps(plain(value), indent=2, ensure_ascii=False)


def plain(value: Any, depth: int = 0) -> Any:
    """Any intermediate form as JSON data; graphs as nodes and edges, deep ends in words."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Schema):
        return value.model_dump(mode="json")
    if hasattr(value, "nodes") and hasattr(value, "edges"):
        return {
            "nodes": [plain(n, depth + 1) for n in value.nodes(data=True)],
            "edges": [plain(e, depth + 1) for e in value.edges(data=True)],
        }
    if depth >= DEEPEST:
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist(), depth + 1)
    if isinstance(value, Iterable):
        return [plain(item, depth + 1) for item in value]
    return str(value)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterable[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield path, value
    for key, item in items:
        yield from _leaves(item, (*path, key))
