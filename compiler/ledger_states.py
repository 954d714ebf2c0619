"""Collectives of parameters and gradients: FSDP's gathers and reductions, and sums over replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shipway.compiler.evaluate_states import Bytes
from shipway.compiler.held import Degrees, Held, held, is_whole_vector
from shipway.compiler.lower import Part, Placed
from shipway.compiler.operators.base import Parameter
from shipway.compiler.operators.router import Router
from shipway.compiler.workload import FIRST, LAST, Row, Workload

StateAxis = Literal["dp_shard", "expert_shard"]


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True)
class ChunkStates:
    """Parameters of one model chunk on one rank."""

    groups: tuple[Group, ...]
    vectors: tuple[Held, ...]
    """What FSDP leaves whole on every rank."""

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """Every trained parameter; layers of one kind share theirs."""
        return (*(h for group in self.groups for h in group.held), *self.vectors)


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
    distinct = {id(operators): operators for operators in layers}
    kinds = {key: _layer_groups(operators, degrees) for key, operators in distinct.items()}
    groups = [group for operators in layers for group in kinds[id(operators)][0]]
    vectors = [vector for operators in layers for vector in kinds[id(operators)][1]]
    whole = _held((p for placed in root for p in placed.operator.parameters()), degrees)
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


def _layer_groups(operators: Iterable[Placed], degrees: Degrees) -> tuple[list[Group], tuple[Held, ...]]:
    """Routed experts and the router, which computes in fp32, are gathered apart from the rest."""
    experts: list[Parameter] = []
    router: list[Parameter] = []
    rest: list[Parameter] = []
    vectors: list[Parameter] = []
    for placed in operators:
        for parameter in placed.operator.parameters():
            if parameter.sharding == "expert":
                experts.append(parameter)
            elif is_whole_vector(parameter):
                vectors.append(parameter)
            else:
                (router if isinstance(placed.operator, Router) else rest).append(parameter)
    named: tuple[tuple[str, StateAxis, list[Parameter]], ...] = (
        ("expert parameters", "expert_shard", experts),
        ("router parameters", "dp_shard", router),
        ("layer parameters", "dp_shard", rest),
    )
    groups = [Group(name, axis, _held(parameters, degrees)) for name, axis, parameters in named if parameters]
    return groups, _held(vectors, degrees)


def _held(parameters: Iterable[Parameter], degrees: Degrees) -> tuple[Held, ...]:
    result = []
    for parameter in parameters:
        if parameter.optimizer == "none":
            continue  # a buffer
        mine = held(parameter, degrees)
        if mine is None:
            raise ValueError(f"{parameter.name} {parameter.shape} cannot be shared by {degrees}")
        result.append(mine)
    return tuple(result)
