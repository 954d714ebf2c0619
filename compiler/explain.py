"""Look up what a user asks about: a code, a field, or a term."""

from __future__ import annotations

import re
from functools import lru_cache

from shipway.compiler.codes import Code, codes
from shipway.compiler.fields import FieldEntry, walk
from shipway.compiler.frozen import frozen
from shipway.compiler.glossary import Term, terms
from shipway.schemas.blueprint import Blueprint


@frozen
class FieldWords:
    """A field with the keys of its section, if it is one."""

    path: str
    type: str
    default: str
    description: str
    owner: str
    keys: tuple[tuple[str, str], ...] = ()


@lru_cache(maxsize=1)
def _fields() -> tuple[FieldEntry, ...]:
    return tuple(walk(Blueprint))


def _plain(path: str) -> str:
    """A path without positions: `training.stages.*.context` and `training.stages.0.context` are one."""
    return ".".join(part for part in path.split(".") if part != "*" and not part.isdigit())


def names() -> tuple[str, ...]:
    """Everything that can be asked about."""
    fields = dict.fromkeys(_plain(entry.path) for entry in _fields())
    last = dict.fromkeys(path.rpartition(".")[2] for path in fields)
    aliases = (alias for term in terms().values() for alias in term.aliases)
    return (*codes(), *terms(), *aliases, *fields, *last)


def find(asked: str) -> list[Code | Term | FieldWords]:
    """What `asked` names; a last part such as `kv_rank` finds its fields wherever they stand."""
    wanted = asked.strip().strip("`")
    code = codes().get(wanted.upper())
    if code is not None:
        return [code]
    folded = _folded(wanted)
    term = next((t for t in terms().values() if folded in map(_folded, (t.name, *t.aliases))), None)
    path = _plain(wanted.lower())
    entries = [entry for entry in _fields() if _plain(entry.path) == path]
    if not entries and term is None:
        entries = [entry for entry in _fields() if _plain(entry.path).endswith("." + path)]
    found: list[Code | Term | FieldWords] = [term] if term else []
    found.extend(_words(entry) for entry in dict.fromkeys(entries))
    return found


def find_each(words: list[str]) -> tuple[list[Code | Term | FieldWords], list[str]]:
    """What several words name, and those that name nothing; a term may take several (`step time`)."""
    found: list[Code | Term | FieldWords] = []
    unknown: list[str] = []
    start = 0
    while start < len(words):
        for end in range(len(words), start, -1):
            items = find(" ".join(words[start:end]))
            if items:
                found.extend(item for item in items if item not in found)
                break
        else:
            end = start + 1
            unknown.append(words[start])
        start = end
    return found, unknown if found else [" ".join(words)]


def _folded(name: str) -> str:
    """A name as it is compared: case, `_` and `-` make no difference, a degree (`FSDP64`) neither, nor that
    a collective is issued again."""
    plain = re.sub(r"(, again| to watch)$", "", name.lower().replace("_", " ").replace("-", " "))
    return re.sub(r"^(pp|vp|dp|fsdp|cp|tp|ep)\s*\d+$", r"\1", plain)


def _words(entry: FieldEntry) -> FieldWords:
    below = len(_plain(entry.path).split(".")) + 1
    keys: dict[str, str] = {}
    for other in _fields():
        plain = _plain(other.path)
        if plain.startswith(_plain(entry.path) + ".") and len(plain.split(".")) == below:
            keys.setdefault(plain.rpartition(".")[2], other.description)
    return FieldWords(
        _plain(entry.path), entry.type, entry.default, entry.description, entry.owner, tuple(keys.items())
    )
