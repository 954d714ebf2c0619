"""Frozen dataclasses behave as those of the standard library do."""

import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from functools import cached_property

import pytest

from shipway.compiler.frozen import frozen


@frozen
class Point:
    """A place."""

    x: int
    y: int = 0
    own: list[int] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def total(self) -> int:
        """Both."""
        return self.x + self.y


@dataclass(frozen=True)
class Standard:
    """The same by the standard library."""

    x: int
    y: int = 0
    own: list[int] = field(default_factory=list, compare=False, repr=False)


@frozen
class Deep(Point):
    """A place below another."""

    z: int = 5


@frozen(eq=False)
class Apart:
    """Equal to nothing but itself."""

    x: int


@frozen
class Nothing:
    """No fields."""


def test_values_defaults_and_factories_are_those_of_a_standard_dataclass() -> None:
    assert asdict(Point(1)) == asdict(Standard(1))
    assert asdict(Point(1, y=2, own=[3])) == asdict(Standard(1, y=2, own=[3]))
    assert Point(1).own is not Point(1).own
    assert [f.name for f in fields(Point)] == [f.name for f in fields(Standard)]
    assert repr(Point(1, 2)) == repr(Standard(1, 2)).replace("Standard", "Point")
    assert Point(1, 2).total == 3


def test_wrong_arguments_are_refused_as_functions_refuse_them() -> None:
    with pytest.raises(TypeError, match=r"Point\.__init__\(\) missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'w'"):
        Point(1, w=2)  # type: ignore[call-arg]


def test_nothing_can_be_set_or_deleted() -> None:
    point = Point(1)
    for change in (lambda: setattr(point, "x", 2), lambda: delattr(point, "x")):
        with pytest.raises(FrozenInstanceError, match=r"Point\.x never changes"):
            change()
    assert replace(point, x=2) == Point(2)


def test_equal_values_are_equal_and_have_one_hash() -> None:
    assert Point(1, 2, [1]) == Point(1, 2, [2])
    assert hash(Point(1, 2, [1])) == hash(Point(1, 2, [2]))
    assert Point(1) != Point(2)
    assert Point(1) != Deep(1)
    assert len({Point(1), Point(1), Point(2)}) == 2
    assert Nothing() == Nothing()
    assert hash(Nothing()) == hash(Nothing())
    assert repr(Nothing()) == "Nothing()"


def test_without_eq_an_instance_is_equal_to_itself_alone() -> None:
    one = Apart(1)
    assert one == one
    assert one != Apart(1)
    assert len({one, Apart(1)}) == 2


def test_a_class_inherits_fields_and_methods() -> None:
    deep = Deep(1, 2)
    assert (deep.x, deep.y, deep.z, deep.total) == (1, 2, 5, 3)
    assert deep == Deep(1, 2, z=5)


def test_instances_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(Point(1, 2))) == Point(1, 2)
