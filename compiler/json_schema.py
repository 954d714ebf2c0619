"""JSON Schemas of the blueprint and of each config group, for editors.

They check types and names, not completeness: a file may leave to its defaults list what it does not
say, and any value may be an interpolation. `shipway validate` checks the whole.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from pydantic import BaseModel

GROUPS = ("blueprint", "model", "training", "cluster", "device")

DIALECT = "https://json-schema.org/draft/2020-12/schema"
INTERPOLATION = {
    "type": "string",
    "pattern": r"\$\{.+\}|^\?\?\?$",
    "description": "An interpolation such as ${training.seed}.",
}
DEFAULTS = {
    "type": "array",
    "description": "Configs that this file is laid over, in Hydra's form.",
    "items": {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "minProperties": 1, "maxProperties": 1},
        ]
    },
}


def json_schema(group: str) -> dict[str, Any]:
    """The schema of a blueprint or of one group's files."""
    from shipway.compiler.docstrings import describe

    model = _model(group)
    describe(model)
    schema = deepcopy(model.model_json_schema())
    definitions: dict[str, Any] = schema.pop("$defs", {})
    for definition in (schema, *definitions.values()):
        _loosen(definition)
    for owner in (schema, *definitions.values()):
        if "device" in owner.get("properties", {}):
            _allow_device_name(owner["properties"])
    schema["properties"] = {"defaults": DEFAULTS, **schema["properties"]}
    title = "A Shipway blueprint" if group == "blueprint" else f"A Shipway {group} config"
    return {"$schema": DIALECT, "title": title, **{k: v for k, v in schema.items() if k != "title"}} | (
        {"$defs": definitions} if definitions else {}
    )


def _model(group: str) -> type[BaseModel]:
    from shipway.schemas.blueprint import Blueprint
    from shipway.schemas.cluster import Cluster, Device
    from shipway.schemas.model import Model
    from shipway.schemas.training import Training

    models: dict[str, type[BaseModel]] = {
        "blueprint": Blueprint,
        "model": Model,
        "training": Training,
        "cluster": Cluster,
        "device": Device,
    }
    return models[group]


def _loosen(definition: dict[str, Any]) -> None:
    """Let a section be partial, and each of its values be an interpolation."""
    definition.pop("required", None)
    for name, value in definition.get("properties", {}).items():
        definition["properties"][name] = _escaped(_untagged(value))


def _untagged(value: Any) -> Any:
    """Tagged unions as plain alternatives: a layer over another file need not repeat the kind."""
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {k: _untagged(v) for k, v in value.items() if k not in ("discriminator", "oneOf", "title")}
    if "oneOf" in value:
        kept["anyOf"] = [_untagged(item) for item in value["oneOf"]]
    return kept


def _escaped(value: dict[str, Any]) -> dict[str, Any]:
    """The value or an interpolation, and the same for entries of lists and mappings."""
    outside = ("description", "default", "examples")
    inner = {key: item for key, item in value.items() if key not in outside}
    around = {key: item for key, item in value.items() if key in outside}
    alternatives = inner["anyOf"] if set(inner) == {"anyOf"} else [inner]
    return {**around, "anyOf": [*map(_with_escaped_entries, alternatives), INTERPOLATION]}


def _with_escaped_entries(value: dict[str, Any]) -> dict[str, Any]:
    entries: dict[str, Any] = {
        k: _escaped(value[k]) for k in ("items", "additionalProperties") if isinstance(value.get(k), dict)
    }
    if "prefixItems" in value:
        entries["prefixItems"] = [_escaped(item) for item in value["prefixItems"]]
    return value | entries


def _allow_device_name(properties: dict[str, Any]) -> None:
    device = properties["device"]
    name = {"type": "string", "description": "A name from the device group, such as h200."}
    device["anyOf"] = [name, *device["anyOf"]]
