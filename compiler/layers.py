"""Hydra's part of composition: which files are laid over each other, in which order, and the result."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shipway.compiler.documents import Document, KeyPath, read_document
from shipway.compiler.frozen import frozen
from shipway.compiler.groups import SearchPath
from shipway.compiler.provenance import dotted
from shipway.schemas.diagnostics import Diagnostic, Location


@frozen
class Layer:
    """One file, and the section that it is laid under."""

    document: Document
    package: KeyPath


@frozen
class Merged:
    """What Hydra made of a blueprint."""

    config: Any
    """An OmegaConf container; None when there is a problem."""
    layers: tuple[Layer, ...]
    """Files in the order of merging."""
    problem: BaseException | None = None

    def located(self, overrides: Sequence[str], root: Location) -> Diagnostic:
        """The problem as a diagnostic, at the place that it is about."""
        assert self.problem is not None
        clash = next(_clashes(self.layers), None)
        if clash is not None:
            return clash
        lines = _lines(self.problem)
        where = root
        for number, override in enumerate(overrides, start=1):
            named = override.lstrip("+~").partition("=")[0]
            if any(word in " ".join(lines) for word in (override, f"'{named}'", f"values for {named}.")):
                where = Location(file=f"override {number}", line=1, column=1, source_line=override)
        summary = lines[0].rstrip(".:") if lines else "the defaults lists cannot be composed"
        return Diagnostic(code="BP016", summary=summary, where=where, because=tuple(lines[1:2]))


def merge(path: Path, search: SearchPath, choices: Sequence[str]) -> Merged:
    """Compose the blueprint in `path`; `choices` are overrides of its defaults list, as Hydra has them."""
    import hydra  # 0.3 s: only for who needs it
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from shipway.compiler.hydra_source import extend_hydra

    name = path.name.removesuffix(path.suffix)
    layers: tuple[Layer, ...] = ()
    try:
        with hydra.initialize(config_path=None, version_base="1.3"), warnings.catch_warnings():
            # Where `_self_` is missing a file's own values win, as one expects.
            warnings.simplefilter("ignore")
            loader = GlobalHydra.instance().config_loader()
            extend_hydra(loader, search)
            defaults = loader.compute_defaults_list(name, list(choices), RunMode.RUN).defaults
            layers = tuple(_layers(defaults, search))
            config = hydra.compose(name, overrides=list(choices))
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        return Merged(None, layers, error)
    return Merged(config, layers)


def _layers(defaults: Sequence[Any], search: SearchPath) -> Iterator[Layer]:
    for default in defaults:
        if default.config_path is None or default.config_path.startswith("hydra"):
            continue
        found = search.find(default.config_path)
        if found is not None:
            parts = (default.package or "").split(".")
            yield Layer(read_document(found), tuple(part for part in parts if part not in ("", "_global_")))


def _clashes(layers: Sequence[Layer]) -> Iterator[Diagnostic]:
    """Keys that one file gives as a list and another as a mapping, which OmegaConf does not merge."""
    forms: dict[KeyPath, tuple[type, Location]] = {}
    for layer in layers:
        for path, mark in layer.document.marks.items():
            value = layer.document.data
            for key in path:
                value = value[key]
            if not path or path[0] == "defaults" or not mark.container:
                continue
            full = layer.package + path
            place = layer.document.at(*mark.value)
            before = forms.get(full)
            if before is not None and before[0] is not type(value):
                yield Diagnostic(
                    code="BP016",
                    summary=f"`{dotted(full)}` is a {_form(value)} here and a {_form(before[0]())} in "
                    "the file that this is laid over",
                    field=dotted(full),
                    where=place,
                    because=(f"the {_form(before[0]())} is at {before[1]}",),
                    help=f"Give it one form in all files, or set it by an override: '{dotted(full)}=...'",
                )
            forms[full] = (type(value), place)


def _form(value: Any) -> str:
    return "list" if isinstance(value, list) else "mapping"


def _lines(problem: BaseException) -> list[str]:
    """The first line of an error and of each that caused it."""
    lines: list[str] = []
    cause: BaseException | None = problem
    while cause is not None:
        lines += [line.strip() for line in str(cause).splitlines() if line.strip()][:1]
        cause = cause.__cause__ or cause.__context__
    return list(dict.fromkeys(lines))
