"""Where every value of a composed blueprint came from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shipway.compiler.documents import Document, Key, KeyPath
from shipway.compiler.frozen import frozen
from shipway.schemas.diagnostics import Location

_REFERENCE = re.compile(r"\$\{\s*(\.*)([A-Za-z_][^${}:\s]*)\s*\}")


@frozen
class Origin:
    """One value's place: where its key and the value itself are written."""

    value: Location
    key: Location
    reference: str | None = None
    """The text of the interpolation that gave the value, such as `${training.seed}`."""
    targets: tuple[KeyPath, ...] = ()
    """The paths that the interpolation names."""


@dataclass
class Provenance:
    """Origins by path; later layers win, lists are replaced whole, as Hydra merges."""

    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    root: Location = field(default_factory=lambda: Location(file="default"))
    """The blueprint's own file."""
    taken_out: dict[KeyPath, Location] = field(default_factory=dict)
    """Sections and values that an override deletes, with the override."""

    def add_document(self, document: Document, package: KeyPath, skip: frozenset[str] = frozenset()) -> None:
        """Lay a file's values over what is there, under `package`."""
        for path, mark in document.marks.items():
            if not path or path[0] in skip:
                continue
            full = package + path
            previous = self.origins.get(full)
            if self._replaces(document, path):
                self.remove(full)
            elif previous is not None and isinstance(_at(document.data, path), dict):
                # A section that several files write belongs to the first; its values to each.
                continue
            value = document.at(*mark.value)
            self.origins[full] = Origin(value, document.at(*mark.key) if mark.key else value)

    def _replaces(self, document: Document, path: KeyPath) -> bool:
        # Elements of a list come after the list itself, which has already cleared what was below.
        return not isinstance(_at(document.data, path), dict)

    def add_override(self, number: int, text: str, path: KeyPath, value: Any) -> None:
        """Record override `number` (from one), which sets `path` to `value`."""
        self.remove(path)
        column = text.index("=") + 2 if "=" in text else 1
        where = Location(file=f"override {number}", line=1, column=column, source_line=text)
        key = where.model_copy(update={"column": 1})
        for below in _paths(value):
            self.origins[path + below] = Origin(where, key)
        for length in range(1, len(path)):
            self.origins.setdefault(path[:length], Origin(key, key))

    def remove(self, path: KeyPath) -> None:
        """Forget a value and all that is below it."""
        for known in [p for p in self.origins if p[: len(path)] == path]:
            del self.origins[known]

    def take_out(self, path: KeyPath, where: Location) -> None:
        """Record that the override at `where` deletes a value or the choice of a group."""
        self.remove(path)
        self.taken_out[path] = where

    def refer(self, path: KeyPath, text: str) -> None:
        """Record that the value at `path` is the interpolation `text`."""
        targets = []
        for dots, name in _REFERENCE.findall(text):
            base = path[: len(path) - len(dots)] if dots else ()
            targets.append(base + parse_path(name))
        origin = self.origin(path)
        self.origins[path] = replace(origin, reference=text, targets=tuple(targets))

    def origin(self, path: KeyPath) -> Origin:
        """The origin of the value, or of the nearest section around it."""
        for length in range(len(path), 0, -1):
            found = self.origins.get(path[:length])
            if found is not None:
                return found if length == len(path) else Origin(found.key, found.key)
        return Origin(self.root, self.root)

    def location(self, path: KeyPath, *, key: bool = False) -> Location:
        """Where the value at `path`, or its key, is written."""
        origin = self.origin(path)
        return origin.key if key else origin.value

    def known(self, path: KeyPath) -> bool:
        """Whether somebody wrote this value; if not, it is a default."""
        return path in self.origins

    def trace(self, path: KeyPath) -> tuple[str, ...]:
        """How an interpolated value came to be, one step a line; empty for a plain value."""
        steps: list[str] = []
        pending, seen = [path], {path}
        while pending:
            here = pending.pop(0)
            origin = self.origins.get(here)
            if origin is None or origin.reference is None:
                continue
            steps.append(f"{dotted(here)} is {origin.reference} ({origin.value})")
            for target in origin.targets:
                if self.known(target) and target not in seen:
                    seen.add(target)
                    steps.append(f"{dotted(target)} is written at {self.origins[target].value}")
                    pending.append(target)
        return tuple(steps)

    def because(self, path: KeyPath, value: Any) -> tuple[str, ...]:
        """`path = value` and where that came from, for a diagnostic."""
        source = str(self.location(path)) if self.known(path) else "default"
        return (f"{dotted(path)} = {shown(value)} ({source})", *self.trace(path))


def dotted(path: KeyPath) -> str:
    """A path as the user types it."""
    return ".".join(map(str, path))


def parse_path(text: str) -> KeyPath:
    """The path that `a.b.0.c` or `a.b[0].c` means."""
    parts = text.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts if part)


def shown(value: Any) -> str:
    """A value in YAML's words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if abs(value) >= 10_000:
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case list() | tuple():
            return "[" + ", ".join(shown(item) for item in value) + "]"
    return str(value)


def _at(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data


def _paths(value: Any) -> Iterator[KeyPath]:
    yield ()
    items: list[tuple[Key, Any]] = []
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        for below in _paths(item):
            yield (key, *below)
