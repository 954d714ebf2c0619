"""A layout as people write it, `tp=8, pp=4` or as plans print it, `PP4 TP8`, read into constraints."""

from __future__ import annotations

import re
from typing import Any, get_args

from shipway.compiler.suggest import did_you_mean, ordered
from shipway.schemas.diagnostics import Diagnostic, Location
from shipway.schemas.layout import LayoutConstraints, Offload, Recompute, Schedule, Zero

NAMES = {
    "pp": "pipeline_parallel",
    "vp": "virtual_stages",
    "dp": "data_parallel_replicate",
    "replicas": "data_parallel_replicate",
    "fsdp": "data_parallel_shard",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
    "ep": "expert_parallel",
}
"""Short names, as plans print them; `dp` counts replicas of what `fsdp` shards."""
CHOICES: dict[str, tuple[str, ...]] = {
    "zero": tuple(str(level) for level in get_args(Zero)),
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
}
_ITEM = re.compile(r"(?P<name>[A-Za-z][A-Za-z_-]*)(?:\s*[=:]\s*|\s+|(?=\d)|$)(?P<value>[\w.+-]*)")
_BETWEEN = re.compile(r"(?:\s*x\s+\d+(?=\s*(?:,|;|$)))?[\s,;]*(?:x\s+)?(?:DP\s+(?=replicas))?")
"""Commas, spaces, the `x` between degrees, and the number of micro-batches, which follows from the rest."""
_LARGEST = 10**9


def read_layout(text: str, option: str) -> LayoutConstraints | Diagnostic:
    """What is asked of a layout; the diagnostic points into `text`, which was given to `option`."""
    found: dict[str, Any] = {}
    position = _skip(text, 0)
    while position < len(text):
        item = _ITEM.match(text, position)
        if item is None:
            return _wrong(text, option, position, f"`{text[position:]}` is no part of a layout")
        field = _field(item["name"])
        if field is None:
            return _unknown(text, option, position, item["name"])
        if field in found:
            return _wrong(text, option, position, f"`{item['name']}` is given twice")
        value = _value(field, item["value"])
        if value is None:
            return _wrong_value(text, option, item, field)
        found[field] = value
        position = _skip(text, item.end())
    if not found:
        return _wrong(text, option, 0, "nothing is asked of the layout")
    return LayoutConstraints(**found)


def _skip(text: str, position: int) -> int:
    between = _BETWEEN.match(text, position)
    return position if between is None else between.end()


def _field(name: str) -> str | None:
    """The field that a name stands for, in any case and with either dash."""
    folded = name.lower().replace("-", "_")
    field = NAMES.get(folded, folded)
    return field if field in LayoutConstraints.model_fields else None


def _value(field: str, text: str) -> int | str | None:
    if field in CHOICES:
        folded = text.lower()
        if folded not in CHOICES[field]:
            return None
        return int(folded) if field == "zero" else folded
    if not text.isdecimal() or not 0 < int(text[:12]) <= _LARGEST:
        return None
    return int(text)


def _wrong(text: str, option: str, position: int, summary: str, **more: Any) -> Diagnostic:
    where = Location(file=option, line=1, column=position + 1, source_line=text)
    more = {"help": 'Write degrees as in "tp=8, pp=4", or as the plan prints them: "PP4 TP8".', **more}
    return Diagnostic(code="CL002", summary=summary, where=where, **more)


def _unknown(text: str, option: str, position: int, name: str) -> Diagnostic:
    known = (*NAMES, *(f for f in LayoutConstraints.model_fields if f not in NAMES.values()))
    meant = did_you_mean(name, (*known, *LayoutConstraints.model_fields))
    more = {"help": meant} if meant else {}
    summary = f"a layout has no `{name}`"
    return _wrong(text, option, position, summary, legal=ordered(name, known), **more)


def _wrong_value(text: str, option: str, item: re.Match[str], field: str) -> Diagnostic:
    given = f"`{item['value']}`" if item["value"] else "nothing"
    if field in CHOICES:
        summary = f"{item['name']} is one of {', '.join(CHOICES[field])}, not {given}"
        return _wrong(text, option, item.start("value"), summary, legal=CHOICES[field], help="")
    summary = f"{item['name']} is a whole number from 1 on, not {given}"
    return _wrong(text, option, item.start("value"), summary)
