"""One YAML file, read once: its data, and for every value the line and column where it stands.

Scalars follow YAML 1.2 (`yes` and `3:1` are text, `010` is ten, `1e-4` a number), as Hydra's
override grammar does; YAML 1.1 would read an oversubscription of `3:1` as 181.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml

from shipway.compiler.frozen import frozen
from shipway.schemas.diagnostics import Diagnostic, Location

Key = str | int
KeyPath = tuple[Key, ...]

MAXIMUM_VALUES = 100_000
"""Values one file may expand to: nested aliases can turn a few lines into gigabytes."""

_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("int", r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
)


@frozen
class Mark:
    """Where a key (if any) and its value stand; lines and columns count from one."""

    key: tuple[int, int] | None
    value: tuple[int, int]
    container: bool = False
    """Whether the value is a mapping or a list."""


@frozen
class Document:
    """A parsed file."""

    path: Path
    lines: tuple[str, ...]
    data: Any
    """Plain data: dicts with string keys, lists, scalars."""
    marks: dict[KeyPath, Mark]
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def readable(self) -> bool:
        """Whether the text was YAML at all; where not, `data` says nothing."""
        return not any(d.code in {"BP001", "BP002", "BP003"} for d in self.diagnostics)

    @cached_property
    def _shown(self) -> str:
        return display_path(self.path)  # once: every value has a location

    def location(self, path: KeyPath, *, key: bool = False) -> Location:
        """Where the value at `path` stands (or its key), or else the nearest value around it."""
        for length in range(len(path), -1, -1):
            mark = self.marks.get(path[:length])
            if mark is not None:
                use_key = mark.key is not None and (key or length < len(path))
                return self.at(*(mark.key if use_key and mark.key else mark.value))
        return self.at(1, 1)

    def at(self, line: int, column: int) -> Location:
        """The location of a line and column of this file."""
        source = self.lines[line - 1] if 0 < line <= len(self.lines) else None
        return Location(file=self._shown, line=line, column=column, source_line=source)


def display_path(path: Path) -> str:
    """A path as its user would type it: relative where that is shorter to say."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def read_document(path: Path) -> Document:
    """Read and parse a file; mistakes are in `diagnostics`, never raised."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = "is a folder" if path.is_dir() else f"cannot be read: {(error.strerror or 'error').lower()}"
        return _broken(path, (), "BP001", f"{display_path(path)} {reason}", None, "Name a YAML file.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        return _broken(
            path,
            tuple(raw.decode("utf-8", "replace").splitlines()),
            "BP001",
            f"byte 0x{raw[error.start]:02x} is not UTF-8 text",
            (line, column),
            "Save the file as UTF-8.",
        )
    return parse_document(path, text)


@lru_cache(maxsize=256)
def parse_document(path: Path, text: str) -> Document:
    """Parse the text of a file; a pure function, so it is remembered."""
    lines = tuple(text.splitlines())
    try:
        root = yaml.compose(text, Loader=_loader())
    except yaml.YAMLError as error:
        return _syntax_error(path, lines, error)
    if root is None:
        help_text = "Write a mapping of sections, or start from `shipway init`."
        return _broken(path, lines, "BP003", "the file is empty", (1, 1), help_text)
    builder = _Builder(path, lines)
    data = builder.build(root, (), None)
    return Document(path, lines, data, builder.marks, tuple(builder.diagnostics))


@lru_cache(maxsize=1)
def _loader() -> type[Any]:
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader: Any = type("BlueprintLoader", (base,), {"yaml_implicit_resolvers": {}})
    for tag, pattern, first in _RESOLVERS:
        firsts = [char if char != "\0" else "" for char in first]
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), firsts)
    loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
    return loader  # type: ignore[no-any-return]


def _broken(
    path: Path,
    lines: tuple[str, ...],
    code: str,
    summary: str,
    where: tuple[int, int] | None,
    help_text: str,
) -> Document:
    bare = Document(path, lines, None, {})
    location = bare.at(*where) if where else Location(file=display_path(path))
    diagnostic = Diagnostic(code=code, summary=summary, where=location, help=help_text)
    return Document(path, lines, None, {}, (diagnostic,))


def _syntax_error(path: Path, lines: tuple[str, ...], error: yaml.YAMLError) -> Document:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    help_text = "Correct the YAML at this place; the mistake may start on the line above."
    if isinstance(error, yaml.reader.ReaderError):
        before = "\n".join(lines)[: error.position]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        problem, help_text = f"character {error.character!r} is not allowed in YAML", "Remove it."
    offending = lines[line - 1] if line <= len(lines) else ""
    indent = offending[: len(offending) - len(offending.lstrip())]
    if "\t" in indent or offending[column - 1 : column] == "\t":
        column = offending.index("\t") + 1
        return _broken(
            path, lines, "BP002", "a tab is used for indentation", (line, column), "Indent with spaces."
        )
    if "expected a single document" in str(error):
        problem, help_text = "a second YAML document starts here", "Keep one document in a file."
    return _broken(path, lines, "BP002", f"not valid YAML: {problem}", (line, column), help_text)


@dataclass
class _Builder:
    """Turns yaml's nodes into data and marks, collecting mistakes."""

    path: Path
    lines: tuple[str, ...]
    marks: dict[KeyPath, Mark] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    open_nodes: list[int] = field(default_factory=list)
    count: int = 0

    def build(self, node: yaml.Node, path: KeyPath, key: yaml.Node | None) -> Any:
        """The data of `node`, whose marks are kept under `path`."""
        self.count += 1
        if self.count > MAXIMUM_VALUES:
            if self.count == MAXIMUM_VALUES + 1:
                self._report("BP002", "aliases expand to more values than a blueprint can have", node)
            return None
        if id(node) in self.open_nodes:
            self._report("BP002", "an alias refers to the mapping or list that it stands in", node)
            return None
        container = not isinstance(node, yaml.ScalarNode)
        empty = isinstance(node, yaml.ScalarNode) and node.value == "" and not node.style
        # Through an alias the node keeps the anchor's place, which is where the value is written.
        place = _start(key) if key and empty else _start(node)
        self.marks[path] = Mark(_start(key) if key else None, place, container)
        self.open_nodes.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*path, i), None) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.ScalarNode)
            return self._scalar(node, path)
        finally:
            self.open_nodes.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        own: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self._key_name(key)
            if name is None:
                continue
            if name in own:
                first = _start(own[name])
                self._report(
                    "BP004",
                    f"`{name}` is written twice in one mapping",
                    key,
                    field_path=(*path, name),
                    because=(f"the first is on line {first[0]}, column {first[1]}",),
                    help_text="Keep one of the two.",
                )
                continue
            own[name] = key
            data[name] = self.build(value, (*path, name), key)
        for name, key, value in self._merged(node):
            if name not in data:
                data[name] = self.build(value, (*path, name), key)
        return data

    def _merged(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Entries that `<<` brings in, nearest first."""
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                continue
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in sources:
                if not isinstance(source, yaml.MappingNode) or id(source) in self.open_nodes:
                    self._report("BP002", "`<<` merges something that is not another mapping", value)
                    continue
                for inner_key, inner_value in source.value:
                    name = self._key_name(inner_key)
                    if name is not None and inner_key.tag != "tag:yaml.org,2002:merge":
                        yield name, inner_key, inner_value
                yield from self._merged(source)

    def _key_name(self, key: yaml.Node) -> str | None:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:null":
            self._report("BP002", "a key must be plain text", key)
            return None
        return str(key.value)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text, kind = str(node.value), node.tag.rpartition(":")[2]
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                digits = text.replace("_", "")
                return int(digits, 16 if digits.lower().startswith("0x") else 10)
            case "float":
                number = text.replace("_", "").lower()
                return float(number.replace(".inf", "inf").replace(".nan", "nan"))
            case "str" | "merge" | "value":
                return self._text(text, node, path)
        self._report("BP002", f"the tag {node.tag} has no meaning here", node, field_path=path)
        return None

    def _text(self, text: str, node: yaml.Node, path: KeyPath) -> str | None:
        if "${" not in text:
            return text
        from omegaconf.errors import GrammarParseError
        from omegaconf.grammar_parser import parse

        try:
            parse(text)
        except GrammarParseError:
            self._report(
                "BP020",
                f"{text!r} is not a well-formed interpolation",
                node,
                field_path=path,
                help_text="Write ${section.key}, or quote a literal dollar as \\${...}.",
            )
            return None
        return text

    def _report(
        self,
        code: str,
        summary: str,
        node: yaml.Node,
        *,
        field_path: KeyPath = (),
        because: tuple[str, ...] = (),
        help_text: str = "",
    ) -> None:
        where = Document(self.path, self.lines, None, {}).at(*_start(node))
        self.diagnostics.append(
            Diagnostic(
                code=code,
                summary=summary,
                field=".".join(map(str, field_path)),
                where=where,
                because=because,
                help=help_text,
            )
        )


def _start(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
