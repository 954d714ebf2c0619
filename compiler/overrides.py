"""Overrides in Hydra's syntax, parsed one by one so that each mistake names its override."""

from __future__ import annotations

from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from shipway.compiler.documents import KeyPath
from shipway.compiler.frozen import frozen
from shipway.compiler.groups import SearchPath
from shipway.compiler.provenance import parse_path
from shipway.compiler.suggest import did_you_mean, ordered
from shipway.schemas.diagnostics import Diagnostic, Location


@frozen
class ParsedOverride:
    """One override, classified."""

    number: int
    """Position on the command line, from one."""
    text: str
    """As typed."""
    key: str
    """Group or dotted path, without its prefix."""
    value: Any
    group: bool
    """Whether it chooses a config of a group."""
    delete: bool
    add: bool
    package: str | None = None

    @property
    def path(self) -> KeyPath:
        """The path of the value that it sets."""
        return parse_path(self.key)

    def location(self, column: int = 1) -> Location:
        """The place that diagnostics show."""
        return Location(file=f"override {self.number}", line=1, column=column, source_line=self.text)


def parse_overrides(
    texts: tuple[str, ...], search: SearchPath
) -> tuple[list[ParsedOverride], list[Diagnostic]]:
    """Classify each override; those that cannot be read become diagnostics."""
    parser = OverridesParser.create()
    parsed: list[ParsedOverride] = []
    problems: list[Diagnostic] = []
    for number, text in enumerate(texts, start=1):
        where = Location(file=f"override {number}", line=1, column=1, source_line=text)
        try:
            (override,) = parser.parse_overrides([text])
        except HydraException as error:
            problems.append(_unreadable(text, where, error))
            continue
        problem = _refused(override, where, search)
        if problem is not None:
            problems.append(problem)
            continue
        value = None if override.is_delete() else override.value()
        key = override.key_or_group
        group = search.is_group(key) and not isinstance(value, dict) and not override.is_delete()
        parsed.append(
            ParsedOverride(
                number, text, key, value, group, override.is_delete(), override.is_add(), override.package
            )
        )
    return parsed, problems


def _unreadable(text: str, where: Location, error: HydraException) -> Diagnostic:
    if "=" not in text and not text.startswith("~"):
        summary = f"`{text}` is not an override: it has no `=`"
    else:
        summary = f"`{text}` is not an override in Hydra's syntax"
    detail = str(error).strip().splitlines()
    return Diagnostic(
        code="BP030",
        summary=summary,
        where=where,
        because=tuple(detail[:1]),
        help="Write key=value, such as cluster=h200_8 or training.micro_batch=2; quote special characters.",
    )


def _refused(override: Override, where: Location, search: SearchPath) -> Diagnostic | None:
    if override.is_sweep_override():
        return Diagnostic(
            code="BP031",
            summary=f"`{override.input_line}` names several values, but a plan takes one",
            where=where,
            help="Give one value, or a list as key=[a,b].",
        )
    if override.is_hydra_override():
        return Diagnostic(
            code="BP031",
            summary="Hydra's own settings cannot be overridden",
            where=where,
            help="Use --config-dir to add a folder of config groups.",
        )
    if not override.key_or_group:
        return Diagnostic(
            code="BP030",
            summary=f"an override needs a key: `{override.input_line}` has none before its `=`",
            where=where,
            help="Write key=value, such as cluster=h200_8 or training.micro_batch=2.",
        )
    value = override.value()
    group = override.key_or_group
    if not search.is_group(group) or isinstance(value, dict) or override.is_delete():
        return None
    options = search.options(group)
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str) or search.find(f"{group}/{name}") is None:
            shown = "null" if name is None else name
            return Diagnostic(
                code="BP011",
                summary=f"there is no {group} config named `{shown}`",
                field=group,
                where=where,
                legal=ordered(str(shown), options),
                help=did_you_mean(str(shown), options) or f"Name one of these, or delete it with ~{group}.",
            )
    return None


def chosen_twice(override: ParsedOverride, groups: set[str]) -> Diagnostic | None:
    """A `+` before a group that the blueprint has chosen from already, or a `++`: Hydra composes neither."""
    named = override.key + (f"@{override.package}" if override.package else "")
    forced = override.text.startswith("++")
    if not override.group or not (forced or (override.add and named in groups)):
        return None
    if forced:
        summary = f"`++` sets values, it does not choose a {named}"
    else:
        summary = f"the blueprint has chosen a {named} already, so `{override.text}` cannot add another"
    return Diagnostic(
        code="BP016",
        summary=summary,
        field=override.key,
        where=override.location(),
        help=f"Write {override.text.lstrip('+')}, which takes the place of what was chosen.",
    )


def apply_override(config: Any, override: ParsedOverride) -> Diagnostic | None:
    """Set or delete a value of an OmegaConf container; a mapping is laid over a mapping, as in Hydra."""
    from omegaconf import DictConfig, ListConfig, open_dict

    parent, path = config, override.path
    for depth, key in enumerate(path[:-1]):
        below = _child(parent, key)
        if below is None and isinstance(parent, DictConfig) and not override.delete:
            with open_dict(parent):
                parent[key] = {}
            below = parent[key]
        if not isinstance(below, (DictConfig, ListConfig)):
            return _no_such_place(override, path[: depth + 1], parent, key)
        parent = below
    key = path[-1]
    if isinstance(parent, ListConfig) and not (isinstance(key, int) and key < len(parent)):
        return _no_such_place(override, path, parent, key)
    if override.delete:
        if key not in parent and not isinstance(parent, ListConfig):
            return _no_such_place(override, path, parent, key)
        with open_dict(config):
            del parent[key]
        return None
    value = override.value
    with open_dict(config):
        existing = _child(parent, key)
        if isinstance(value, dict) and isinstance(existing, DictConfig):
            existing.merge_with(value)
        else:
            parent[key] = value
    return None


def _child(parent: Any, key: Any) -> Any:
    """The container or value below `key`, interpolations left as they are; None where there is none."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if isinstance(parent, ListConfig):
        if not isinstance(key, int) or key >= len(parent):
            return None
    elif not isinstance(parent, DictConfig) or key not in parent:
        return None
    if OmegaConf.is_interpolation(parent, key) or OmegaConf.is_missing(parent, key):
        return None
    return parent[key]


def _no_such_place(override: ParsedOverride, path: KeyPath, parent: Any, key: Any) -> Diagnostic:
    from omegaconf import ListConfig

    name = ".".join(map(str, path))
    if isinstance(parent, ListConfig):
        summary = f"`{name}` does not exist: the list has {len(parent)} entries"
        legal = tuple(map(str, range(len(parent))))
    elif override.delete:
        known = [str(k) for k in parent]
        summary, legal = f"`{name}` does not exist, so it cannot be deleted", ordered(str(key), known)
    else:
        summary, legal = f"`{name}` is a single value, so nothing can stand below it", ()
    return Diagnostic(
        code="BP032",
        summary=summary,
        field=name,
        where=override.location(),
        legal=legal,
        help="Name a value that the blueprint has.",
    )
