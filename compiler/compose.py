"""Compose a blueprint: Hydra's compose API over config groups, then overrides and interpolations.

Nothing is validated here beyond what composition needs; every value's origin is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shipway.compiler.documents import Document, KeyPath, display_path, read_document
from shipway.compiler.provenance import Provenance, dotted
from shipway.schemas.diagnostics import Diagnostic, Location

SECTIONS = ("model", "training", "cluster")


@dataclass(frozen=True)
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
    if path.suffix in (".yaml", ".yml") or "/" in name or path.is_dir():
        if path.is_file() and path.suffix in (".yaml", ".yml"):
            return path
        if path.is_dir():
            summary, help_text = f"{name} is a folder", "Name the blueprint's YAML file in it."
        elif path.is_file():
            summary, help_text = f"{name} is not a YAML file", "Give the file the ending .yaml."
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
        from shipway.compiler.defaults import DefaultsWalk
        from shipway.compiler.overrides import parse_overrides

        overrides, problems = parse_overrides(self.origin[1:], self.search)
        self.diagnostics += problems
        chosen = {o.key: (str(o.value),) for o in overrides if o.group}
        walk = DefaultsWalk(self.search, chosen)
        walk.visit(self.path, "")
        for group, (option,) in chosen.items():
            if found := self.search.find(f"{group}/{option}"):
                walk.visit(found, group)
        self.diagnostics += walk.diagnostics
        if any(d.code not in {"BP004", "BP020", "BP030", "BP031"} for d in self.diagnostics):
            return self._result({}, complete=False)
        composed = self._compose(overrides, walk.groups)
        if composed is None:
            return self._result({}, complete=False)
        data = self._resolve(composed)
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
        import hydra
        from hydra.core.global_hydra import GlobalHydra
        from hydra.errors import HydraException
        from hydra.types import RunMode
        from omegaconf.errors import OmegaConfBaseException

        from shipway.compiler.groups import extend_hydra

        choosing = [o for o in overrides if o.group or (o.delete and o.key in groups)]
        setting = [o for o in overrides if o not in choosing]
        texts = [self._hydra_text(o, groups) for o in choosing]
        name = self.path.name.removesuffix(self.path.suffix)
        try:
            with hydra.initialize(config_path=None, version_base="1.3"):
                loader = GlobalHydra.instance().config_loader()
                extend_hydra(loader, self.search)
                config = hydra.compose(name, overrides=texts)
                # Each file with the package that it is laid under, in the order of merging.
                layers = loader.compute_defaults_list(name, texts, RunMode.RUN).defaults
        except (HydraException, OmegaConfBaseException, RecursionError) as error:
            self.diagnostics.append(self._hydra_problem(error))
            return None
        for layer in layers:
            self._lay(layer.config_path, layer.package or "")
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
            self.provenance.remove(override.path)
        else:
            self.provenance.add_override(override.number, override.text, override.path, override.value)

    def _lay(self, config_path: str | None, package: str) -> None:
        if config_path is None or config_path.startswith("hydra"):
            return
        found = self.search.find(config_path)
        if found is None:
            return
        document = read_document(Path(found))
        prefix: KeyPath = tuple(part for part in package.split(".") if part and part != "_global_")
        skip = frozenset({"defaults"} | ({"hydra"} if not prefix else set()))
        if prefix:
            self._open_section(document, prefix)
        self.provenance.add_document(document, prefix, skip)

    def _open_section(self, document: Document, prefix: KeyPath) -> None:
        """A section that only a group file fills starts at that file's first line."""
        from shipway.compiler.provenance import Origin

        start = document.location(())
        for length in range(1, len(prefix) + 1):
            self.provenance.origins.setdefault(prefix[:length], Origin(start, start))

    def _place_device(self, config: Any) -> None:
        """Replace the name of a device by its figures."""
        from omegaconf import OmegaConf, open_dict

        from shipway.compiler.provenance import Origin

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

    def _resolve(self, config: Any) -> dict[str, Any]:
        """Plain data, with interpolations resolved one by one so that each failure has its place."""
        data = self._resolve_node(config, ())
        assert isinstance(data, dict)
        return data

    def _resolve_node(self, node: Any, path: KeyPath, depth: int = 0) -> Any:
        from omegaconf import DictConfig, ListConfig, OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if depth > 64:
            self._report("BP021", f"the interpolation at {dotted(path)} leads into itself", path)
            return None
        if not isinstance(node, (DictConfig, ListConfig)):
            return node
        if node._is_none():
            return None
        keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
        values: dict[Any, Any] = {}
        for key in keys:
            here: KeyPath = (*path, key)
            if OmegaConf.is_interpolation(node, key):
                raw = OmegaConf.to_container(node, resolve=False)
                self.provenance.refer(here, str(raw[key]))  # type: ignore[index]
            elif OmegaConf.is_missing(node, key):
                self._report(
                    "BP022",
                    f"`{dotted(here)}` is `???`: a value that you must give",
                    here,
                    help_text=f"Write it in the file, or add the override {dotted(here)}=...",
                )
                values[key] = None
                self.unknown.append(here)
                continue
            try:
                child = node[key]
            except (OmegaConfBaseException, RecursionError) as error:
                self._interpolation_problem(here, error, list(_all_keys(config_root(node))))
                values[key] = None
                self.unknown.append(here)
                continue
            values[key] = self._resolve_node(child, here, depth + 1)
        if isinstance(node, ListConfig):
            return [values[key] for key in keys]
        return values

    def _interpolation_problem(self, path: KeyPath, error: BaseException, known: list[str]) -> None:
        from shipway.compiler.provenance import shown
        from shipway.compiler.suggest import did_you_mean

        origin = self.provenance.origin(path)
        text = origin.reference or "this interpolation"
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        because = [f"`{dotted(path)}` is {shown(text)}"]
        help_text = ""
        missing = [dotted(t) for t in origin.targets if dotted(t) not in known]
        if isinstance(error, RecursionError) or "Recursive interpolation" in cause:
            summary = f"the interpolation {text} leads back to itself"
            because += self.provenance.trace(path)[1:]
        elif missing and "key" in cause.lower():
            summary = f"{text} names `{missing[0]}`, which does not exist"
            help_text = did_you_mean(missing[0], known)
        else:
            summary = f"{text} cannot be resolved"
            because.append(cause)
        code = "BP021"
        self._report(code, summary, path, because=tuple(because), help_text=help_text)

    def _hydra_problem(self, error: BaseException) -> Diagnostic:
        """A located diagnostic for what only Hydra could find."""
        lines: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            lines += [line.strip() for line in str(cause).splitlines() if line.strip()][:2]
            cause = cause.__cause__
        text = " ".join(lines)
        where = self.provenance.root
        for number, override in enumerate(self.origin[1:], start=1):
            key = override.lstrip("+~").partition("=")[0]
            if override in text or f"'{key}'" in text:
                where = Location(file=f"override {number}", line=1, column=1, source_line=override)
        summary = lines[0].rstrip(".") if lines else "the defaults lists cannot be composed"
        return Diagnostic(code="BP016", summary=summary, where=where, because=tuple(lines[1:3]))

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


def config_root(node: Any) -> Any:
    """The outermost container of an OmegaConf node."""
    while node._get_parent() is not None:
        node = node._get_parent()
    return node


def _all_keys(node: Any, prefix: str = "") -> Any:
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in items:
        name = prefix + str(key)
        yield name
        yield from _all_keys(value, name + ".")
