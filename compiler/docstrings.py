"""What the docstring below each field of a schema says, read when it is asked for.

Pydantic could read them when a class is made, but looks for every class's source to do so, which would
cost each command more than all other work on schemas.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel


def description(model: type[BaseModel], name: str) -> str:
    """The docstring of a field, where it or a base of it has one."""
    given = model.model_fields[name].description
    if given:
        return given
    found = (_documented(base.__module__).get((base.__name__, name)) for base in model.__mro__)
    return next((text for text in found if text), "")


def describe(root: type[BaseModel]) -> None:
    """Give the fields of a schema, and of all schemas in it, their docstrings as descriptions."""
    for model in dict.fromkeys(_below(root)):
        for name, field in model.model_fields.items():
            field.description = description(model, name) or None
        model.model_rebuild(force=True)


def _below(annotation: Any) -> Iterator[type[BaseModel]]:
    """The schemas in an annotation, inner ones before those that hold them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for field in annotation.model_fields.values():
            yield from _below(field.annotation)
        yield annotation
    for argument in get_args(annotation):
        yield from _below(argument)


@cache
def _documented(module: str) -> dict[tuple[str, str], str]:
    """Docstrings of a module's fields by class and name."""
    found: dict[tuple[str, str], str] = {}
    if module.startswith("shipway."):
        tree = ast.parse(inspect.getsource(sys.modules[module]))
        for item in ast.walk(tree):
            if isinstance(item, ast.ClassDef):
                found |= {(item.name, name): text for name, text in _below_fields(item)}
    return found


def _below_fields(item: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for line, after in zip(item.body, item.body[1:], strict=False):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield line.target.id, inspect.cleandoc(str(after.value.value))
