"""Collectives of parameters and gradients: FSDP's gathers and reductions, and sums over replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal

from shipway.compiler.evaluate_states import Bytes
from shipway.compiler.frozen import frozen
from shipway.compiler.held import Degrees, Held, held, is_whole_vector
from shipway.compiler.lower import Part, Placed
from shipway.compiler.operators.base import Parameter
from shipway.compiler.operators.router import Router
from shipway.compiler.workload import FIRST, LAST, Row, Workload

StateAxis = Literal["dp_shard", "expert_shard"]


@frozen(eq=False)
class Group:
    """Parameters that FSDP gathers and reduces in one call."""

    name: str
    axis: StateAxis
    held: tuple[Held, ...]
    is_root: bool = False
    """The root of a model chunk stays gathered from forward to backward, whatever the ZeRO level."""

    def gathered_bytes(self, sizes: Bytes) -> int:
        """What an all-gather ends with."""
        return sum(h.gathered_elements * (4 if h.parameter.fp32 else sizes.compute) for h in self.held)

    @cached_property
    def part_elements(self) -> int:
        """Elements of this rank's shard, as reductions leave them."""
        return sum(h.part_elements for h in self.held)


@frozen
class ChunkStates:
    """Parameters of one model chunk on one rank."""

    groups: tuple[Group, ...]
    vectors: tuple[Held, ...]
    """What FSDP leaves whole on every rank."""

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """Every trained parameter; layers of one kind share theirs."""
        return (*(h for group in self.groups for h in group.held), *self.vectors)


class _Known:
    """Parts and groups of a chunk, equal ones once: kinds of layers differ in little."""

    def __init__(self, degrees: Degrees) -> None:
        self.degrees = degrees
        self._parts: dict[tuple[object, ...], Held] = {}
        self._groups: dict[tuple[object, ...], Group] = {}

    def parts(self, parameters: Iterable[Parameter]) -> tuple[Held, ...]:
        """A rank's parts of what is trained, not of buffers."""
        return tuple(self._part(p) for p in parameters if p.optimizer != "none")

    def group(self, name: str, axis: StateAxis, parameters: Iterable[Parameter]) -> Group:
        """What FSDP takes together."""
        parts = self.parts(parameters)
        return self._groups.setdefault((name, *map(id, parts)), Group(name, axis, parts))

    def _part(self, p: Parameter) -> Held:
        key = (p.shape, p.sharding, p.optimizer, p.muon_heads, p.fp32)
        if key not in self._parts:
            mine = held(p, self.degrees)
            if mine is None:
                raise ValueError(f"{p.name} {p.shape} cannot be shared by {self.degrees}")
            self._parts[key] = mine
        return self._parts[key]


def chunk_states(work: Workload, first: int, end: int, degrees: Degrees) -> ChunkStates:
    """States of layers `first` to `end`, with embedding and head where they are the model's ends.

    Raises ValueError where the ranks cannot share a parameter, which no planned layout has.
    """
    root: list[Placed] = []
    layers: list[tuple[Placed, ...]] = []
    for row in _rows(work, first, end):
        for part in row.parts:
            own, inner = _own_and_layer(part, row.recomputable)
            root += own
            if inner:
                layers.append(inner)
    known = _Known(degrees)
    distinct = {id(operators): operators for operators in layers}
    kinds = {key: _layer_groups(operators, known) for key, operators in distinct.items()}
    groups = [group for operators in layers for group in kinds[id(operators)][0]]
    vectors = [vector for operators in layers for vector in kinds[id(operators)][1]]
    whole = known.parts(p for placed in root for p in placed.operator.parameters())
    name = "embedding, head and what is outside layers"
    if whole:
        groups.append(Group(name, "dp_shard", whole, is_root=True))
    return ChunkStates(tuple(groups), tuple(vectors))


def _rows(work: Workload, first: int, end: int) -> Iterator[Row]:
    if first == 0:
        yield work.rows[FIRST]
    yield from (work.rows[kind] for kind in work.layer_rows[first:end])
    if end == work.layers:
        yield work.rows[LAST]


def _own_and_layer(part: Part, is_layer: bool) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """Operators outside and inside a layer: multi-token prediction has a layer and things of its own."""
    if is_layer:
        return (), part.operators
    inner = tuple(p for p in part.operators if p.path.split(".")[0] == "layer")
    return tuple(p for p in part.operators if p not in inner), inner


def _layer_groups(operators: Iterable[Placed], known: _Known) -> tuple[list[Group], tuple[Held, ...]]:
    """Routed experts and the router, which computes in fp32, are gathered apart from the rest."""
    experts: list[Parameter] = []
    router: list[Parameter] = []
    rest: list[Parameter] = []
    vectors: list[Parameter] = []
    for placed in operators:
        others = router if isinstance(placed.operator, Router) else rest
        for parameter in placed.operator.parameters():
            if parameter.sharding == "expert":
                experts.append(parameter)
            elif is_whole_vector(parameter):
                vectors.append(parameter)
            else:
                others.append(parameter)
    named: tuple[tuple[str, StateAxis, list[Parameter]], ...] = (
        ("expert parameters", "expert_shard", experts),
        ("router parameters", "dp_shard", router),
        ("layer parameters", "dp_shard", rest),
    )
    groups = [known.group(name, axis, parameters) for name, axis, parameters in named if parameters]
    return groups, known.parts(vectors)
