"""Blueprints that need none of Hydra's finer points are laid together here, without it.

That is a defaults list of `group: name` lines that ends in `_self_`, files that are mappings without
headers, defaults lists and interpolations of their own, and no overrides but `group=name`. Importing Hydra
and composing by it takes several times as long as planning; what it would give is the same, which tests
hold. Whatever is anything else, or a mistake, is left to Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from shipway.compiler.documents import Document, read_document
from shipway.compiler.frozen import frozen
from shipway.compiler.groups import SearchPath
from shipway.compiler.layers import Layer

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_VALUES = {"null", "true", "false", "nan", "inf"}
"""Words that are no names in Hydra's overrides, in any case."""


@frozen
class Plain:
    """A blueprint laid together."""

    data: dict[str, Any]
    """Free of interpolations; a device that is named is not yet in its place."""
    layers: tuple[Layer, ...]
    """Files in the order of merging."""
    device: Document | None
    """The device that the cluster names, if it names one."""


def lay_together(document: Document, search: SearchPath, overrides: Sequence[str]) -> Plain | None:
    """The composed blueprint, or None where Hydra has to compose it."""
    chosen = _choices(overrides)
    files = None if chosen is None or not _clean(document) else _groups(document, search, chosen)
    if files is None:
        return None
    layers = [Layer(file, (group,)) for group, file in files.items()]
    layers.append(Layer(document, ()))
    data: dict[str, Any] = {}
    for layer in layers:
        values = {key: value for key, value in layer.document.data.items() if key != "defaults"}
        for group in layer.package:
            values = {str(group): values}
        if not _lay(data, values):
            return None
    cluster = data.get("cluster")
    name = cluster.get("device") if isinstance(cluster, dict) else None
    if not isinstance(name, str):
        return Plain(data, tuple(layers), None)
    device = _read(search.find(f"device/{name}"))
    return None if device is None else Plain(data, tuple(layers), device)


def _choices(overrides: Sequence[str]) -> dict[str, str] | None:
    """Configs chosen by overrides, by group; None where an override is anything else."""
    chosen: dict[str, str] = {}
    for text in overrides:
        group, sign, name = text.partition("=")
        plain = sign and _NAME.match(group) and _NAME.match(name) and name.lower() not in _VALUES
        if not plain or group in chosen or group == "hydra":
            return None
        chosen[group] = name
    return chosen


def _groups(document: Document, search: SearchPath, chosen: dict[str, str]) -> dict[str, Document] | None:
    """The files that the defaults list names, by group."""
    entries = document.data.get("defaults", ["_self_"])
    if not isinstance(entries, list) or not entries or entries[-1] != "_self_":
        return None
    files: dict[str, Document] = {}
    for entry in entries[:-1]:
        ((group, name),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else (("", ""),)
        name = chosen.get(group, name)
        if group in files or not _NAME.match(group) or not isinstance(name, str) or not _NAME.match(name):
            return None
        file = _read(search.find(f"{group}/{name}"))
        if file is None or "defaults" in file.data:
            return None
        files[group] = file
    return files if chosen.keys() <= files.keys() else None


def _read(path: Path | None) -> Document | None:
    document = None if path is None else read_document(path)
    return document if document is not None and _clean(document) else None


def _clean(document: Document) -> bool:
    """Whether a file is a mapping without mistakes, headers and interpolations."""
    if document.diagnostics or not isinstance(document.data, dict) or "hydra" in document.data:
        return False
    headed = any(line.lstrip().startswith("# @") for line in document.lines)
    return not headed and not any("${" in text or text == "???" for text in _texts(document.data))


def _texts(value: Any) -> Iterator[str]:
    """Every text in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _lay(below: dict[str, Any], above: dict[str, Any]) -> bool:
    """Lay values over others; False where a mapping meets anything else."""
    for key, value in above.items():
        if key not in below:
            below[key] = deepcopy(value)
        elif isinstance(value, dict) and isinstance(below[key], dict):
            if not _lay(below[key], value):
                return False
        elif (
            isinstance(value, dict)
            or isinstance(below[key], dict)
            or isinstance(value, list) is not isinstance(below[key], list)
        ):
            return False
        else:
            below[key] = deepcopy(value)
    return True
