"""Defaults lists, read before Hydra composes them, so that a mistake in one has a place.

Hydra's own errors name neither file nor line, and a cycle ends in a RecursionError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shipway.compiler.documents import Document, KeyPath, read_document
from shipway.compiler.frozen import frozen
from shipway.compiler.groups import SearchPath
from shipway.compiler.hydra_source import header_of
from shipway.compiler.suggest import did_you_mean, ordered
from shipway.schemas.diagnostics import Diagnostic

_ENTRY = re.compile(r"^(?P<words>(?:(?:optional|override)\s+)*)(?P<group>[^@\s]+)(?:@(?P<package>\S+))?$")


@frozen
class Entry:
    """One line of a defaults list."""

    where: KeyPath
    """Path of the entry in its document."""
    group: str
    """Group, from the root; empty for an entry that names a whole config."""
    options: tuple[str, ...]
    """Configs chosen from it."""
    optional: bool = False


@dataclass
class DefaultsWalk:
    """Every file that a blueprint reaches, and what is wrong on the way."""

    search: SearchPath
    chosen: Mapping[str, tuple[str, ...]]
    """Group choices that overrides make, which replace those in the files."""
    documents: dict[Path, Document] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    """Groups that some defaults list names, with `@package` where it is given."""
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def visit(self, path: Path, base: str, trail: tuple[Path, ...] = ()) -> None:
        """Read a file in group `base` and all that its defaults list names."""
        document = read_document(path)
        if path not in self.documents:
            self.documents[path] = document
            self.diagnostics.extend(document.diagnostics)
            self._require_mapping(document, base)
            self._check_header(document)
            if not base and isinstance(document.data, dict) and "hydra" in document.data:
                self._report(
                    "BP101",
                    "Hydra's own settings have no meaning in a blueprint",
                    document,
                    ("hydra",),
                    key=True,
                    help_text="Take the section out; --config-dir adds a folder of config groups.",
                )
        if not isinstance(document.data, dict) or "defaults" not in document.data:
            return
        for entry in self._entries(document, base):
            for option in entry.options:
                name = f"{entry.group}/{option}" if entry.group else option
                found = self.search.find(name)
                if found is None:
                    if not entry.optional:
                        self._missing(document, entry, option)
                elif found == path or found in trail:
                    self._cycle(document, entry, (*trail, path, found))
                else:
                    self.visit(found, name.rpartition("/")[0], (*trail, path))

    def _require_mapping(self, document: Document, base: str) -> None:
        if not document.readable or isinstance(document.data, dict):
            return
        kind = "a list" if isinstance(document.data, list) else "a single value"
        what = f"a {base} config" if base else "a blueprint"
        self._report(
            "BP012",
            f"{what} must be a mapping of keys to values, not {kind}",
            document,
            (),
            help_text="Write `key: value` lines.",
        )

    def _check_header(self, document: Document) -> None:
        if header_of(document) is None:
            self._report(
                "BP010",
                "the header comment must be `# @package PATH`",
                document,
                (),
                help_text="Name one dotted path, or `_global_` for the blueprint's root.",
            )

    def _entries(self, document: Document, base: str) -> list[Entry]:
        raw = document.data["defaults"]
        if not isinstance(raw, list):
            self._report(
                "BP010",
                "`defaults` must be a list",
                document,
                ("defaults",),
                help_text="Write one line for each group, such as `- model: tiny`.",
            )
            return []
        entries = [self._entry(document, base, i, item) for i, item in enumerate(raw)]
        return [entry for entry in entries if entry is not None]

    def _entry(self, document: Document, base: str, index: int, item: Any) -> Entry | None:
        where: KeyPath = ("defaults", index)
        if item == "_self_":
            return None
        if isinstance(item, str):
            name = item.partition("@")[0]
            full = name.lstrip("/") if name.startswith("/") or not base else f"{base}/{name}"
            return Entry(where, *_split(full))
        if not isinstance(item, dict) or len(item) != 1:
            self._report(
                "BP010",
                "an entry of `defaults` must be `group: name`, a name, or `_self_`",
                document,
                where,
                help_text="Write `- model: tiny`.",
            )
            return None
        ((key, value),) = item.items()
        match = _ENTRY.match(key)
        options = value if isinstance(value, list) else [value]
        if match is None or not all(option is None or isinstance(option, str) for option in options):
            self._report(
                "BP010",
                f"`{key}: {value}` is not an entry of a defaults list",
                document,
                (*where, key),
                help_text="Write `- group: name`, with quotes if the name is a number.",
            )
            return None
        group = match["group"]
        full = group.lstrip("/") if group.startswith("/") or not base else f"{base}/{group}"
        self.groups.add(full + (f"@{match['package']}" if match["package"] else ""))
        names = self.chosen.get(full, tuple(o for o in options if o is not None and "${" not in o))
        overriding = full in self.chosen
        return Entry((*where, key), full, () if overriding else names, "optional" in match["words"])

    def _missing(self, document: Document, entry: Entry, option: str) -> None:
        group = entry.group
        options = self.search.options(group)
        if group and not options:
            known = [g for g in ("model", "cluster", "training", "device") if self.search.options(g)]
            summary, legal = f"there is no config group `{group}`", ordered(group, known)
            guess = did_you_mean(group, known)
        else:
            summary = f"there is no {group or 'blueprint'} config named `{option}`"
            legal, guess = ordered(option, options), did_you_mean(option, options)
        self._report(
            "BP011",
            summary,
            document,
            entry.where,
            legal=legal,
            help_text=guess or "Add the file, or name one that exists.",
            because=tuple(f"looked in {folder}" for folder in _shown_folders(self.search)),
        )

    def _cycle(self, document: Document, entry: Entry, trail: tuple[Path, ...]) -> None:
        start = trail.index(trail[-1])
        ring = " → ".join("/".join(path.parts[-2:]) for path in trail[start:])
        self._report(
            "BP013",
            "the defaults lists run in a circle",
            document,
            entry.where,
            because=(ring,),
            help_text="Take this entry out of the defaults list.",
        )

    def _report(
        self,
        code: str,
        summary: str,
        document: Document,
        where: KeyPath,
        *,
        key: bool = False,
        legal: tuple[str, ...] = (),
        because: tuple[str, ...] = (),
        help_text: str = "",
    ) -> None:
        self.diagnostics.append(
            Diagnostic(
                code=code,
                summary=summary,
                field=".".join(map(str, where)),
                where=document.location(where, key=key),
                legal=legal,
                because=because,
                help=help_text,
            )
        )


def _split(name: str) -> tuple[str, tuple[str, ...]]:
    group, _, option = name.rpartition("/")
    return group, (option,)


def _shown_folders(search: SearchPath) -> list[str]:
    from shipway.compiler.documents import display_path

    return [display_path(folder) for folder in search.folders]
