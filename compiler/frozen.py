"""Frozen dataclasses that are quick to define.

`dataclasses.dataclass(frozen=True)` compiles six methods for each class, which takes half of the time that
the planner's modules load in. Here one is compiled, `__init__`; classes share the others. What else is made
of dataclasses (`fields`, `replace`) takes these too; they may not inherit from one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, dataclass_transform, overload

Class = TypeVar("Class", bound=type)


@overload
def frozen(cls: Class) -> Class: ...


@overload
def frozen(*, eq: bool = True) -> Callable[[Class], Class]: ...


@dataclass_transform(frozen_default=True)
def frozen(cls: Class | None = None, *, eq: bool = True) -> Class | Callable[[Class], Class]:
    """As `dataclass(frozen=True, eq=eq)`; without `eq` instances are equal to nothing but themselves."""
    return (lambda one: _made(one, eq)) if cls is None else _made(cls, eq)


def _made(cls: Class, eq: bool) -> Class:
    dataclass(init=False, repr=False, eq=False)(cls)
    methods: dict[str, object] = {
        "__init__": _init(cls),
        "__repr__": _repr,
        "__setattr__": _refuse,
        "__delattr__": _refuse,
    }
    if eq:
        compared = [field.name for field in fields(cls) if field.compare]
        values = attrgetter(*compared) if compared else type
        methods |= {"_values": staticmethod(values), "__eq__": _eq, "__hash__": _hash}
    for name, method in methods.items():
        if name not in vars(cls):
            setattr(cls, name, method)
    return cls


def _init(cls: type) -> Callable[..., None]:
    """`__init__`; it puts values where `__setattr__`, which refuses them, would have."""
    scope: dict[str, Any] = {"MISSING": MISSING}
    parameters, lines = [], []
    for field in fields(cls):
        name = value = field.name
        if field.default is not MISSING:
            scope[f"{name}_default"] = field.default
            parameters.append(f"{name}={name}_default")
        elif field.default_factory is not MISSING:
            scope[f"{name}_factory"] = field.default_factory
            parameters.append(f"{name}=MISSING")
            value = f"{name}_factory() if {name} is MISSING else {name}"
        else:
            parameters.append(name)
        lines.append(f"    _own[{name!r}] = {value}\n")
    text = f"def __init__(self, {', '.join(parameters)}):\n    _own = self.__dict__\n{''.join(lines)}"
    exec(text, scope)
    method: Callable[..., None] = scope["__init__"]
    method.__qualname__ = f"{cls.__qualname__}.__init__"
    return method


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse(self: Any, name: str, value: object = None) -> NoReturn:
    raise FrozenInstanceError(f"{type(self).__qualname__}.{name} never changes")


def _eq(self: Any, other: Any) -> Any:
    is_same = other.__class__ is self.__class__
    return self._values(self) == self._values(other) if is_same else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._values(self))
