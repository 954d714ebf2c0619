"""The blueprint's language as a tree of fields, read from the schemas: what `explain` and the
translation of validation errors stand on."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shipway.compiler.docstrings import description
from shipway.compiler.documents import Key, KeyPath
from shipway.compiler.frozen import frozen


@frozen
class Member:
    """One alternative of a value's type."""

    type: Any
    """A schema class, a container type, a Literal, or a scalar type."""
    tag: str | None = None
    """What selects it in a tagged union, such as `bounded`."""


def members(annotation: Any) -> tuple[Member, ...]:
    """The alternatives of an annotation, `None` left out."""
    tag = None
    while get_origin(annotation) is Annotated:
        tags = [m.tag for m in annotation.__metadata__ if isinstance(m, Tag)]
        tag = tags[0] if tags else tag
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        found: list[Member] = []
        for argument in get_args(annotation):
            if argument is not type(None):
                found.extend(members(argument))
        return tuple(found)
    return (Member(annotation, tag or _kind(annotation)),)


def _kind(annotation: Any) -> str | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get("kind")
        if field is not None and get_origin(field.annotation) is Literal:
            return str(get_args(field.annotation)[0])
    return None


def is_union(annotation: Any) -> bool:
    """Whether pydantic puts a label of the chosen alternative into an error's path here."""
    return len(members(annotation)) > 1


def model_members(annotation: Any) -> tuple[tuple[str | None, type[BaseModel]], ...]:
    """The schema classes among an annotation's alternatives, with their tags."""
    return tuple(
        (m.tag, m.type)
        for m in members(annotation)
        if isinstance(m.type, type) and issubclass(m.type, BaseModel)
    )


def step(annotation: Any, key: Key) -> tuple[Any, FieldInfo | None]:
    """The annotation below `key`, and the field it belongs to; `(None, None)` where there is none."""
    for member in members(annotation):
        origin, arguments = get_origin(member.type), get_args(member.type)
        if isinstance(member.type, type) and issubclass(member.type, BaseModel):
            field = member.type.model_fields.get(str(key))
            if field is not None:
                return _annotation(field), field
        elif origin is tuple and isinstance(key, int):
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                return arguments[0], None
            if key < len(arguments):
                return arguments[key], None
        elif origin is dict and isinstance(key, str):
            return arguments[1], None
    return None, None


def _annotation(field: FieldInfo) -> Any:
    """A field's annotation with the metadata that pydantic moved out of it."""
    annotation: Any = field.annotation
    for item in field.metadata:
        annotation = Annotated[annotation, item]
    return annotation


def data_path(root: type[BaseModel], loc: tuple[Key, ...]) -> KeyPath:
    """The path in the user's data of an error that pydantic locates at `loc`.

    Pydantic puts the label of a union's member between the keys; labels are dropped, by walking the
    schemas alongside.
    """
    path: list[Key] = []
    annotation: Any = root
    for key in loc:
        if annotation is not None and is_union(annotation):
            chosen = [m for m in members(annotation) if key in (m.tag, getattr(m.type, "__name__", ""))]
            annotation = chosen[0].type if chosen else None
            continue
        annotation = step(annotation, key)[0] if annotation is not None else None
        path.append(key)
    return tuple(path)


def _child(here: Any, key: Key) -> Any:
    if isinstance(here, dict):
        return here.get(key)
    if isinstance(here, list) and isinstance(key, int) and key < len(here):
        return here[key]
    return None


def known_keys(root: type[BaseModel], path: KeyPath, data: Any) -> tuple[str, ...]:
    """Keys that the mapping at `path` may have, given the kind that the data chooses."""
    annotation: Any = root
    here: Any = data
    for key in path:
        annotation, _ = step(_narrow(annotation, here), key)
        here = _child(here, key)
        if annotation is None:
            return ()
    narrowed = _narrow(annotation, here)
    return tuple(name for _, model in model_members(narrowed) for name in model.model_fields)


def _narrow(annotation: Any, here: Any) -> Any:
    """The one alternative that the data's `kind` chooses, or all."""
    options = model_members(annotation)
    if len(options) > 1 and isinstance(here, dict):
        for tag, model in options:
            if tag == here.get("kind"):
                return model
    return annotation


@frozen
class FieldEntry:
    """One field of the blueprint's language."""

    path: str
    """Dotted path; `*` stands for any position or name."""
    type: str
    """Its type in words."""
    description: str
    default: str
    """In words: `required`, or the value."""
    owner: str
    """The schema that it belongs to, and the kind where there are several."""


def walk(root: type[BaseModel], prefix: str = "") -> Iterator[FieldEntry]:
    """Every field under `root`, in the schemas' order."""
    for name, field in root.model_fields.items():
        path = f"{prefix}{name}"
        annotation = _annotation(field)
        yield FieldEntry(
            path, type_words(annotation), description(root, name), default_words(field), _owner(root)
        )
        yield from _walk_below(annotation, path)


def _walk_below(annotation: Any, path: str) -> Iterator[FieldEntry]:
    for member in members(annotation):
        origin, arguments = get_origin(member.type), get_args(member.type)
        if isinstance(member.type, type) and issubclass(member.type, BaseModel):
            yield from walk(member.type, f"{path}.")
        elif origin is tuple:
            yield from _walk_below(arguments[0], f"{path}.*")
        elif origin is dict:
            yield from _walk_below(arguments[1], f"{path}.*")


def _owner(model: type[BaseModel]) -> str:
    kind = _kind(model)
    return f"kind: {kind}" if kind else ""


def default_words(field: FieldInfo) -> str:
    """A field's default in YAML's words."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    return _plain(value)


def _plain(value: Any) -> str:
    from shipway.compiler.provenance import shown

    if isinstance(value, BaseModel):
        kind = getattr(value, "kind", None)
        return f"kind: {kind}" if kind else "its own defaults"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) + "}"
    return shown(value)


_SCALARS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def type_words(annotation: Any) -> str:
    """A type in the user's words."""
    quantity = _quantity(annotation)
    if quantity:
        return quantity + (" or null" if _optional(annotation) else "")
    words = []
    for member in members(annotation):
        origin, arguments = get_origin(member.type), get_args(member.type)
        if origin is Literal:
            words.append(", ".join(map(str, arguments)))
        elif origin is tuple:
            words.append(f"list of {type_words(arguments[0])}")
        elif origin is dict:
            words.append(f"names to {type_words(arguments[1])}")
        elif isinstance(member.type, type) and issubclass(member.type, BaseModel):
            words.append(f"section ({member.tag})" if member.tag else "section")
        else:
            words.append(_SCALARS.get(member.type, str(member.type)))
    text = " or ".join(dict.fromkeys(words))
    return text + (" or null" if _optional(annotation) else "")


def _optional(annotation: Any) -> bool:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def _quantity(annotation: Any) -> str | None:
    """The example of a human quantity, if the annotation is one."""
    pending = [annotation]
    while pending:
        current = pending.pop()
        for item in getattr(current, "__metadata__", ()):
            schema = getattr(item, "json_schema", None)
            if schema and "anyOf" in schema:
                return f"quantity such as {schema['anyOf'][1]['examples'][0]}"
        if get_origin(current) in (Annotated, Union, types.UnionType):
            pending.extend(get_args(current))
    return None
