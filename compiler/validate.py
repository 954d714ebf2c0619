"""Validate a composed blueprint: types first, then the rules across fields; all mistakes at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from shipway.compiler.compose import Composed
from shipway.compiler.documents import KeyPath
from shipway.compiler.fields import data_path, known_keys
from shipway.compiler.not_offered import instead_of_key, instead_of_value
from shipway.compiler.provenance import dotted, shown
from shipway.compiler.suggest import did_you_mean, nearest
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.diagnostics import Diagnostic

_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'")


def validate(composed: Composed) -> tuple[Blueprint | None, list[Diagnostic]]:
    """The blueprint, and what is wrong with it; None when there are errors."""
    from shipway.compiler.rules import check

    diagnostics = list(composed.diagnostics)
    if not composed.complete:
        return None, diagnostics
    infinite = list(_not_finite(composed, composed.data, ()))
    if infinite:
        diagnostics += [*infinite, *_beside(infinite, composed)]
        return None, _without_echoes(diagnostics, composed)
    blueprint, problems = _typed(composed)
    diagnostics += problems
    if blueprint is not None:
        diagnostics += check(blueprint, composed)
    else:
        diagnostics += _partial_rules(composed)
    diagnostics = _without_echoes(diagnostics, composed)
    failed = any(d.severity == "error" for d in diagnostics)
    return (None if failed else blueprint), diagnostics


def _without_echoes(diagnostics: list[Diagnostic], composed: Composed) -> list[Diagnostic]:
    """Leave out what only follows from a value that could not be read or found, and is reported as such."""
    unknown = [dotted(path) for path in composed.unknown]
    unread = {d.where for d in composed.diagnostics if d.where is not None}
    mistyped = {d.where for d in diagnostics if d.code.startswith("BP1")}

    def echo(d: Diagnostic) -> bool:
        if d.code.startswith("BP0"):
            return False
        below = any(d.field == path or d.field.startswith(path + ".") for path in unknown)
        return below or d.where in unread or (not d.code.startswith("BP1") and d.where in mistyped)

    return [d for d in diagnostics if not echo(d)]


def _typed(composed: Composed) -> tuple[Blueprint | None, list[Diagnostic]]:
    try:
        return Blueprint.from_data(composed.data), []
    except ValidationError as error:
        return None, _translate_all(error, composed)


def _partial_rules(composed: Composed) -> list[Diagnostic]:
    """Rules of those sections that are sound by themselves, though another section is not."""
    from shipway.compiler.rules import check_sections

    return check_sections(composed)


def _not_finite(composed: Composed, value: Any, path: KeyPath) -> Iterator[Diagnostic]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _not_finite(composed, item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_finite(composed, item, (*path, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Diagnostic(
            code="BP104",
            summary=f"`{dotted(path)}` must be finite, not {value}",
            field=dotted(path),
            where=composed.provenance.location(path),
            help="Write a number.",
        )


def _beside(infinite: list[Diagnostic], composed: Composed) -> list[Diagnostic]:
    """What else is wrong: found with text in place of those numbers, which no rule can calculate with."""
    readable = replace(composed, data=_without_infinite(composed.data))
    _, problems = _typed(readable)
    places = {d.where for d in infinite}
    fields = tuple(f"{d.field}." for d in infinite)
    others = [d for d in problems if d.where not in places and not f"{d.field}.".startswith(fields)]
    return others + _partial_rules(readable)


def _without_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinite(item) for item in value]
    return "not finite" if isinstance(value, float) and not math.isfinite(value) else value


def _translate_all(error: ValidationError, composed: Composed) -> list[Diagnostic]:
    """Pydantic's errors, one for each place."""
    by_path: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        by_path.setdefault(data_path(Blueprint, item["loc"]), []).append(item)
    found = [
        _translate(path, items, composed)
        for path, items in by_path.items()
        if not _other_form(path, items, by_path)
    ]
    return _taken_out([diagnostic for diagnostic in found if diagnostic is not None], composed)


def _other_form(path: KeyPath, items: list[Any], by_path: dict[KeyPath, list[Any]]) -> bool:
    """Whether a section is only told that it isn't the word which could stand there in its place.

    What is wrong inside of the section is said at its keys: `layout` may be `auto` or a mapping.
    """
    inside = any(len(other) > len(path) and other[: len(path)] == path for other in by_path)
    written = isinstance(items[0]["input"], dict)
    return inside and written and all(item["type"] in ("literal_error", "enum") for item in items)


def _taken_out(found: list[Diagnostic], composed: Composed) -> list[Diagnostic]:
    """One diagnostic for each override that deletes what has to be there."""
    deleted = {dotted(path): where for path, where in composed.provenance.taken_out.items()}
    missing: dict[str, list[str]] = {}
    others = []
    for diagnostic in found:
        path = next((p for p in deleted if f"{diagnostic.field}.".startswith(f"{p}.")), None)
        if diagnostic.code == "BP102" and path is not None:
            missing.setdefault(path, []).append(f"`{diagnostic.field}`")
        else:
            others.append(diagnostic)
    return others + [
        Diagnostic(
            code="BP102",
            summary=f"`{deleted[path].source_line}` takes out what has no default: {', '.join(names)}",
            field=path,
            where=deleted[path],
            help=f"Leave the override out, or set `{path}` to something else.",
        )
        for path, names in missing.items()
    ]


def _translate(path: KeyPath, items: list[Any], composed: Composed) -> Diagnostic | None:
    item = items[0]
    kind, context = item["type"], item.get("ctx") or {}
    if kind == "extra_forbidden":
        return _unknown_key(path, composed)
    if kind == "missing":
        return _missing(path, composed)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _which_kind(path, kind, context, composed)
    if kind == "too_short" and context.get("actual_length") != len(item["input"]):
        return None  # its entries are wrong, which is said of each of them
    value = item["input"]
    if value == "rl" and path[:2] == ("training", "stages") and path[-1] == "kind":
        return _reinforcement_learning(path, composed)
    expected = _expected(items)
    code, help_text = _code_and_help(kind, value)
    reference = composed.provenance.origin(path).reference or ""
    if reference.startswith("${oc.env:") and isinstance(value, str):
        help_text = f"Variables are text; to read a number: ${{oc.decode:{reference}}}"
    legal = expected.legal
    guess = did_you_mean(str(value), legal) if isinstance(value, str) else ""
    if guess:
        legal = (*nearest(str(value), legal), *(v for v in legal if v not in nearest(str(value), legal)))
    return _diagnostic(
        code,
        f"`{dotted(path)}` must be {expected.words}, not {_described(value)}",
        path,
        composed,
        legal=legal,
        help_text=instead_of_value(value) or guess or help_text,
    )


class _Expected:
    """What a value must be, gathered over the alternatives that it fails."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.legal: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return " or ".join(dict.fromkeys(self.parts))


_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of ordinary size",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "a section (a mapping of keys to values)",
    "model_type": "a section (a mapping of keys to values)",
    "model_attributes_type": "a section (a mapping of keys to values)",
    "tuple_type": "a list",
    "list_type": "a list",
}


def _expected(items: list[Any]) -> _Expected:
    expected = _Expected()
    for item in items:
        kind, context = item["type"], item.get("ctx") or {}
        if kind in _TYPES:
            expected.parts.append(_TYPES[kind])
        elif kind in ("literal_error", "enum"):
            values = tuple(_literals(str(context.get("expected", ""))))
            expected.legal = (*expected.legal, *values)
            expected.parts.append(values[0] if len(values) == 1 else "one of its legal values")
        elif kind == "value_error":
            text = str(item["msg"]).removeprefix("Value error, ")
            expected.parts.append(text.removeprefix("expected "))
        else:
            expected.parts.append(_bound(kind, context, str(item["msg"])))
    return expected


def _literals(text: str) -> list[str]:
    quoted = _QUOTED.findall(text)
    return quoted or [part for part in re.split(r",\s*|\s+or\s+", text) if part]


def _bound(kind: str, context: dict[str, Any], message: str) -> str:
    bounds = {
        "greater_than": ("gt", "above {}"),
        "greater_than_equal": ("ge", "at least {}"),
        "less_than": ("lt", "below {}"),
        "less_than_equal": ("le", "at most {}"),
        "too_short": ("min_length", "at least {} long"),
        "too_long": ("max_length", "at most {} long"),
    }
    if kind in bounds:
        name, words = bounds[kind]
        return words.format(shown(context.get(name)))
    if kind == "string_pattern_mismatch":
        return "letters, digits, `_`, `.` and `-`, beginning with a letter or digit"
    return message[:1].lower() + message[1:]


def _code_and_help(kind: str, value: Any) -> tuple[str, str]:
    if kind in ("literal_error", "enum"):
        return "BP103", "Write one of the legal values."
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return "BP104", ""
    if kind in ("too_short", "too_long"):
        return "BP107", ""
    if kind == "string_pattern_mismatch":
        return "BP106", ""
    if isinstance(value, str) and re.fullmatch(r"[-+0-9._eE]+", value) and kind != "string_type":
        return "BP100", "Take the quotes away: in quotes it is text."
    return "BP100", ""


def _described(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return shown(value)
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case str():
            return f"the text {value!r}" if len(value) <= 60 else "a long text"
    return shown(value)


def _unknown_key(path: KeyPath, composed: Composed) -> Diagnostic:
    key = str(path[-1])
    known = known_keys(Blueprint, path[:-1], composed.data)
    section = f"in `{dotted(path[:-1])}`" if len(path) > 1 else "in a blueprint"
    return _diagnostic(
        "BP101",
        f"there is no key `{key}` {section}",
        path,
        composed,
        key=True,
        legal=(*nearest(key, known), *(k for k in known if k not in nearest(key, known))),
        help_text=instead_of_key(key)
        or did_you_mean(key, known)
        or "Use one of the legal keys, or take it out.",
    )


def _missing(path: KeyPath, composed: Composed) -> Diagnostic:
    parent = path[:-1]
    siblings = _value_at(composed.data, parent)
    because: tuple[str, ...] = ()
    if isinstance(path[-1], int):
        summary = f"`{dotted(parent)}` has too few entries: number {path[-1]} is missing"
    else:
        summary = f"`{dotted(path)}` is missing, and it has no default"
        if isinstance(siblings, dict) and siblings:
            because = (f"`{dotted(parent) or 'the blueprint'}` has {', '.join(map(str, siblings))}",)
    top = len(path) == 1 and path[0] in ("model", "training", "cluster")
    help_text = (
        f"Add `- {path[0]}: NAME` to the defaults list, or write the section out."
        if top
        else f"shipway explain {dotted(tuple(key for key in path if isinstance(key, str)))}"
    )
    return _diagnostic("BP102", summary, path, composed, key=True, because=because, help_text=help_text)


def _which_kind(path: KeyPath, kind: str, context: dict[str, Any], composed: Composed) -> Diagnostic:
    legal = tuple(_literals(str(context.get("expected_tags", ""))))
    at = (*path, "kind")
    given = _value_at(composed.data, at)
    if not legal:
        legal = _tags(path)
    if kind == "union_tag_not_found":
        summary = f"`{dotted(path)}` does not say its `kind`"
        return _diagnostic("BP105", summary, path, composed, key=True, legal=legal, help_text="Add `kind:`.")
    if given == "rl" and path[:2] == ("training", "stages"):
        return _reinforcement_learning(at, composed)
    return _diagnostic(
        "BP105",
        f"`{dotted(at)}` must be one of its legal values, not {_described(given)}",
        at,
        composed,
        legal=(*nearest(str(given), legal), *(v for v in legal if v not in nearest(str(given), legal))),
        help_text=did_you_mean(str(given), legal),
    )


def _reinforcement_learning(path: KeyPath, composed: Composed) -> Diagnostic:
    return _diagnostic(
        "BP309",
        f"stage {path[2]} is of kind rl, which this version does not run",
        path,
        composed,
        legal=("pretrain",),
        help_text="Take the stage out, and go on from the checkpoint of the last pre-training stage.",
    )


def _tags(path: KeyPath) -> tuple[str, ...]:
    from shipway.compiler.fields import members, step

    annotation: Any = Blueprint
    for key in path:
        annotation, _ = step(annotation, key)
        if annotation is None:
            return ()
    return tuple(m.tag for m in members(annotation) if m.tag)


def _value_at(data: Any, path: KeyPath) -> Any:
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _diagnostic(
    code: str,
    summary: str,
    path: KeyPath,
    composed: Composed,
    *,
    key: bool = False,
    because: tuple[str, ...] = (),
    legal: tuple[str, ...] = (),
    help_text: str = "",
) -> Diagnostic:
    return Diagnostic(
        code=code,
        summary=summary,
        field=dotted(path),
        where=composed.provenance.location(path, key=key),
        because=(*because, *composed.provenance.trace(path)),
        legal=legal,
        help=help_text,
    )
