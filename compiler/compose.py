"""Compose a blueprint: Hydra's compose API over config groups, then overrides and interpolations.

A blueprint that needs none of that is laid together without Hydra (plain.py), to the same result.

Nothing is validated here beyond what composition needs; every value's origin is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shipway.compiler.documents import Document, KeyPath, display_path, read_document
from shipway.compiler.frozen import frozen
from shipway.compiler.provenance import Provenance, dotted
from shipway.schemas.diagnostics import Diagnostic, Location

if TYPE_CHECKING:
    from shipway.compiler.layers import Layer
    from shipway.compiler.plain import Plain


@frozen
class Composed:
    """A blueprint as plain data, with the origin of every value."""

    data: dict[str, Any]
    provenance: Provenance
    origin: tuple[str, ...]
    """The blueprint's name or path and the overrides, as typed."""
    diagnostics: tuple[Diagnostic, ...] = ()
    """Mistakes found on the way; with `complete`, validation can find the others."""
    complete: bool = True
    """Whether `data` is whole enough to be validated."""
    path: Path | None = None
    """The blueprint's own file."""
    folders: tuple[Path, ...] = ()
    """Folders that config groups were looked for in."""
    unknown: tuple[KeyPath, ...] = field(default=())
    """Paths whose value could not be found; each has a diagnostic, so nothing more is said of them."""


def compose(name_or_path: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Composed:
    """Compose the blueprint called `name_or_path`, with `overrides` in Hydra's syntax.

    A name is looked for in `config_dir`, then among ours; a path is a YAML file, and the folder it
    stands in may hold config groups of its own. Mistakes become diagnostics.
    """
    from shipway.compiler.groups import SearchPath, our_folder

    origin = (name_or_path, *overrides)
    own = [] if config_dir is None else [config_dir]
    if config_dir is not None and not config_dir.is_dir():
        summary = f"the config folder {display_path(config_dir)} does not exist"
        return _failed(origin, Diagnostic(code="BP014", summary=summary, help="Check --config-dir."))
    path = _locate(name_or_path, SearchPath((*own, our_folder())))
    if isinstance(path, Diagnostic):
        return _failed(origin, path)
    path = path.absolute()
    named = SearchPath((*own, our_folder())).find(path.stem)
    # A blueprint of ours is found behind the user's groups, so that theirs win.
    beside = [] if named is not None and named.absolute() == path else [path.parent]
    folders = tuple(dict.fromkeys(folder.absolute() for folder in (*beside, *own, our_folder())))
    return _Composition(path, SearchPath(folders), origin).run()


def _failed(origin: tuple[str, ...], *diagnostics: Diagnostic) -> Composed:
    return Composed({}, Provenance(), origin, diagnostics, complete=False)


def _locate(name: str, search: Any) -> Path | Diagnostic:
    """The blueprint's file."""
    from shipway.compiler.suggest import did_you_mean, ordered

    path = Path(name).expanduser()
    if name in ("-", "/dev/stdin"):
        return Diagnostic(
            code="BP001",
            summary="a blueprint is not read from standard input",
            where=Location(file=name),
            help="Write it to a file first: plans and builds name where they come from.",
        )
    if path.suffix in (".yaml", ".yml", ".json") or "/" in name or path.is_dir():
        if path.is_file() and path.suffix in (".yaml", ".yml"):
            return path
        if path.is_dir():
            summary, help_text = f"{name} is a folder", "Name the blueprint's YAML file in it."
        elif path.is_file():
            summary, help_text = f"{name} is not a YAML file", "Give the file the ending .yaml."
        elif path.exists():
            summary, help_text = f"{name} is not a regular file", "Name the blueprint's YAML file."
        else:
            summary, help_text = f"there is no file {name}", "Check the path; `shipway init` writes one."
            if found := search.find(name.removesuffix(path.suffix)):
                help_text = f"Did you mean `{found.stem}`, which comes with Shipway?"
        return Diagnostic(code="BP001", summary=summary, where=Location(file=name), help=help_text)
    found = search.find(name)
    if found is not None:
        return Path(found)
    names = search.options("")
    return Diagnostic(
        code="BP015",
        summary=f"there is no blueprint named `{name}`",
        legal=ordered(name, names),
        help=did_you_mean(name, names) or "Name one of these, or the path of a YAML file.",
    )


class _Composition:
    """One run of Hydra over one blueprint."""

    def __init__(self, path: Path, search: Any, origin: tuple[str, ...]) -> None:
        self.path = path
        self.search = search
        self.origin = origin
        self.document = read_document(path)
        self.provenance = Provenance(root=self.document.at(1, 1))
        self.diagnostics: list[Diagnostic] = []
        self.unknown: list[KeyPath] = []

    def run(self) -> Composed:
        """Compose, lay provenance, resolve."""
        from shipway.compiler.plain import lay_together

        plain = lay_together(self.document, self.search, self.origin[1:])
        return self._by_hydra() if plain is None else self._plainly(plain)

    def _plainly(self, plain: Plain) -> Composed:
        for layer in plain.layers:
            self._lay(layer)
        if plain.device is not None:
            plain.data["cluster"]["device"] = deepcopy(plain.device.data)
            self._record_device(plain.device)
        return self._result(plain.data, complete=True)

    def _by_hydra(self) -> Composed:
        from shipway.compiler.defaults import DefaultsWalk
        from shipway.compiler.interpolations import Resolution
        from shipway.compiler.overrides import chosen_twice, parse_overrides

        overrides, problems = parse_overrides(self.origin[1:], self.search)
        self.diagnostics += problems
        chosen = {
            o.key: tuple(o.value) if isinstance(o.value, list) else (o.value,) for o in overrides if o.group
        }
        walk = DefaultsWalk(self.search, chosen)
        walk.visit(self.path, "")
        for group, options in chosen.items():
            for option in options:
                walk.visit(self.search.find(f"{group}/{option}"), group)
        self.diagnostics += walk.diagnostics
        self.diagnostics += [p for p in (chosen_twice(o, walk.groups) for o in overrides) if p is not None]
        if any(d.code not in {"BP004", "BP020", "BP030", "BP031"} for d in self.diagnostics):
            return self._result({}, complete=False)
        composed = self._compose(overrides, walk.groups)
        if composed is None:
            return self._result({}, complete=False)
        resolution = Resolution(self.provenance)
        data = resolution.resolve(composed)
        self.diagnostics += resolution.diagnostics
        self.unknown += resolution.unknown
        return self._result(data, complete=True)

    def _result(self, data: dict[str, Any], *, complete: bool) -> Composed:
        return Composed(
            data,
            self.provenance,
            self.origin,
            tuple(self.diagnostics),
            complete,
            self.path,
            self.search.folders,
            tuple(self.unknown),
        )

    def _compose(self, overrides: list[Any], groups: set[str]) -> Any:
        """Hydra's composition, as an OmegaConf container."""
        from shipway.compiler.layers import merge

        choosing = [o for o in overrides if o.group or (o.delete and o.key in groups)]
        setting = [o for o in overrides if o not in choosing]
        texts = [self._hydra_text(o, groups) for o in choosing]
        merged = merge(self.path, self.search, texts)
        if merged.problem is not None:
            self.diagnostics.append(merged.located(self.origin[1:], self.provenance.root))
            return None
        config = merged.config
        for override in choosing:
            if override.delete:
                self.provenance.take_out(override.path, override.location())
        for layer in merged.layers:
            self._lay(layer)
        figures = [o for o in setting if o.path[:2] == ("cluster", "device") and len(o.path) > 2]
        for override in setting:
            if override not in figures:
                self._apply(config, override)
        self._place_device(config)
        for override in figures:
            self._apply(config, override)
        return config

    def _hydra_text(self, override: Any, groups: set[str]) -> str:
        """The choice as Hydra must see it: a group that nothing names yet is added without a `+`."""
        text: str = override.text
        named = override.key + (f"@{override.package}" if override.package else "")
        inline = isinstance(self.document.data, dict) and override.key in self.document.data
        return text if override.delete or override.add or named in groups or inline else f"+{text}"

    def _apply(self, config: Any, override: Any) -> None:
        """Set or delete one value; a key that is new here is judged by the schema, not by a `+`."""
        from shipway.compiler.overrides import apply_override

        problem = apply_override(config, override)
        if problem is not None:
            self.diagnostics.append(problem)
        elif override.delete:
            self.provenance.take_out(override.path, override.location())
        else:
            self.provenance.add_override(override.number, override.text, override.path, override.value)

    def _lay(self, layer: Layer) -> None:
        skip = frozenset({"defaults"} | ({"hydra"} if not layer.package else set()))
        if layer.package:
            self._open_section(layer.document, layer.package)
        self.provenance.add_document(layer.document, layer.package, skip)

    def _open_section(self, document: Document, prefix: KeyPath) -> None:
        """A section that only a group file fills starts at that file's first line."""
        from shipway.compiler.provenance import Origin

        start = document.location(())
        for length in range(1, len(prefix) + 1):
            self.provenance.origins.setdefault(prefix[:length], Origin(start, start))

    def _place_device(self, config: Any) -> None:
        """Replace the name of a device by its figures."""
        from omegaconf import OmegaConf, open_dict

        if "cluster" not in config or OmegaConf.is_interpolation(config, "cluster"):
            return
        cluster = OmegaConf.select(config, "cluster", throw_on_missing=False)
        raw = OmegaConf.to_container(cluster) if OmegaConf.is_dict(cluster) else {}
        name = raw.get("device") if isinstance(raw, dict) else None
        if not isinstance(name, str) or name == "???":
            return
        if "${" in name:
            try:
                name = str(cluster.device)
            except Exception:
                return  # reported when interpolations are resolved
        found = self._device_document(name)
        with open_dict(config):
            cluster["device"] = found.data if found else {}
        if found is None:
            self.unknown.append(("cluster", "device"))
            return
        self._record_device(found)

    def _record_device(self, found: Document) -> None:
        """A device's figures come from its file, the choice of it from where it is named."""
        from shipway.compiler.provenance import Origin

        chosen = self.provenance.origin(("cluster", "device"))
        self.provenance.add_document(found, ("cluster", "device"))
        self.provenance.origins["cluster", "device"] = Origin(chosen.value, chosen.key)

    def _device_document(self, name: str) -> Document | None:
        from shipway.compiler.suggest import did_you_mean, ordered

        path: KeyPath = ("cluster", "device")
        found = self.search.find(f"device/{name}")
        if found is not None:
            document = read_document(Path(found))
            self.diagnostics += document.diagnostics
            if document.readable and isinstance(document.data, dict):
                return document
            if document.readable:
                self._report("BP012", f"device/{name} must be a mapping", path)
            return None
        options = self.search.options("device")
        self._report(
            "BP011",
            f"there is no device named `{name}`",
            path,
            legal=ordered(name, options),
            help_text=did_you_mean(name, options) or "Name one of these, or write the figures out.",
        )
        return None

    def _report(
        self,
        code: str,
        summary: str,
        path: KeyPath,
        *,
        because: tuple[str, ...] = (),
        legal: tuple[str, ...] = (),
        help_text: str = "",
    ) -> None:
        self.diagnostics.append(
            Diagnostic(
                code=code,
                summary=summary,
                field=dotted(path),
                where=self.provenance.location(path),
                because=because,
                legal=legal,
                help=help_text,
            )
        )
