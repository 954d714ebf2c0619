"""What Muon moves: shards of matrices to their owners and updates back, and updates between copies.

The runtime's own assignment (runtime/muon.py, runtime/muon_exchange.py): parameters that are cut alike and
have the same copies go in rounds of bounded size; of ranks with the same block each makes its share, heaviest
first to the one with the least work; matrices that ranks cut have one owner each, found the same way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from shipway.compiler.frozen import frozen
from shipway.compiler.held import Degrees, Held

ROUND_BYTES = 512 * 2**20
"""Whole matrices in flight in one exchange."""
ELEMENT_BYTES = 4
"""Momentum and updates travel in fp32."""
ALONE = " alone"
"""Parameters that are not split over tp have a mesh of their own, and exchanges of their own."""


@frozen
class Exchange:
    """One all-to-all, as the first rank of every group sees it."""

    name: str
    axis: str
    sent_bytes: int


@frozen
class _Item:
    """A parameter that Muon updates."""

    held: Held
    matrix: tuple[int, int]
    pieces: int
    """Matrices exchanged where ranks cut them: slices of the rank's stack, or the whole parameter."""
    heads: int

    @cached_property
    def work(self) -> int:
        """Multiply-adds of a Newton-Schulz step over one piece."""
        small, large = sorted(self.matrix)
        return self.heads * (2 * small**2 * large + small**3)

    @cached_property
    def work_on_part(self) -> float:
        """Of them, the share of the rank's part."""
        return self.work / self.heads * self.held.part_elements / math.prod(self.matrix)

    @cached_property
    def whole_bytes(self) -> int:
        """Of the whole parameter."""
        return self.held.parameter.count * ELEMENT_BYTES

    @property
    def piece_elements(self) -> int:
        """Elements of one piece."""
        return self.heads * self.matrix[0] * self.matrix[1]


@frozen
class _Kind:
    """What parameters that take part in one exchange have in common."""

    axis: str
    """Ranks that cut their matrices; empty where none does."""
    copies: tuple[str, ...]
    """Axes over which ranks hold the same block, the outermost first."""
    is_expert: bool
    """Whether they are experts, whose replicas are process groups of their own."""


def exchanges(parameters: Sequence[Held], degrees: Degrees, per_head: bool) -> Iterator[Exchange]:
    """All exchanges of one optimizer step over the parameters that Muon updates, in the model's order."""
    groups: dict[_Kind, list[_Item]] = {}
    known: dict[int, tuple[list[_Item], _Item]] = {}
    for h in parameters:
        found = known.get(id(h))
        if found is None:
            item = _item(h, per_head)
            axis = "" if _is_whole(h, item) else _axis(h, degrees)
            kind = _Kind(axis, _copies(h, degrees), h.parameter.sharding == "expert")
            found = known[id(h)] = groups.setdefault(kind, []), item
        alike, item = found
        alike.append(item)
    for kind, items in groups.items():
        ranks = math.prod(_ranks(axis, degrees) for axis in (kind.axis, *kind.copies) if axis)
        for some in _rounds(items, ranks):
            yield from _shared(some, kind.axis, kind.copies, degrees)


def _item(h: Held, per_head: bool) -> _Item:
    shape = h.parameter.shape
    if len(shape) == 3:
        return _Item(h, (shape[1], shape[2]), h.part[0], 1)
    heads = h.parameter.muon_heads if per_head else 1
    return _Item(h, (shape[0] // heads, shape[1]), 1, heads)


def _axis(h: Held, degrees: Degrees) -> str:
    """Groups that cut a parameter's matrices; empty where they lie whole on a rank."""
    if h.parameter.sharding == "expert":
        return "expert_shard" if h.dimension > 0 and h.ranks > 1 else ""
    if h.split is None:
        return f"dp_shard{ALONE}" if degrees.dense > 1 else ""
    return "dp_shard x tp" if degrees.dense > 1 else "tp"


def _copies(h: Held, degrees: Degrees) -> tuple[str, ...]:
    replicas = ("dp_replicate",) if degrees.replicate > 1 else ()
    alike = h.split is None and h.parameter.sharding != "expert" and degrees.tensor > 1
    return (*replicas, "tp") if alike else replicas


def _ranks(axis: str, degrees: Degrees) -> int:
    match axis:
        case "expert_shard":
            return degrees.expert_shard
        case "tp":
            return degrees.tensor
        case "dp_replicate":
            return degrees.replicate
        case "dp_shard x tp":
            return degrees.dense * degrees.tensor
    return degrees.dense


def _is_whole(h: Held, item: _Item) -> bool:
    """Whether every rank's block consists of whole heads."""
    if len(h.parameter.shape) == 3:
        return False
    rows = item.matrix[0]
    if h.split == 1 or (h.dimension == 1 and h.ranks > 1):
        return False
    total, part = h.local[0], h.part[0]
    return total % rows == 0 and (part >= total or part % rows == 0)


def _rounds(items: Sequence[_Item], ranks: int) -> list[list[_Item]]:
    result: list[list[_Item]] = [[]]
    held_bytes = 0
    for item in items:
        if held_bytes >= ROUND_BYTES and len(result[-1]) >= ranks:
            result.append([])
            held_bytes = 0
        result[-1].append(item)
        held_bytes += item.whole_bytes
    return result


def _shared(
    items: Sequence[_Item], axis: str, copies: tuple[str, ...], degrees: Degrees
) -> Iterator[Exchange]:
    """One round: the first of each group of copies makes its share, and sends it to all of them."""
    if not items:
        return
    if not copies:
        if axis:
            yield from _together(items, axis, degrees)
        return
    group, *inner = copies
    ranks = _ranks(group, degrees)
    owned = _owned([item.work_on_part for item in items], ranks)
    mine = [items[i] for i in owned]
    yield from _shared(mine, axis, tuple(inner), degrees)
    sent = ranks * sum(item.held.part_elements for item in mine)
    yield Exchange("updates to copies", group, sent * ELEMENT_BYTES)


def _together(items: Sequence[_Item], axis: str, degrees: Degrees) -> Iterator[Exchange]:
    """Shards go to the owners of their matrices, and blocks of the updates come back."""
    pieces = [item for item in items for _ in range(item.pieces)]
    work = [work for item in items for work in [item.work] * item.pieces]
    owned = _owned(work, _ranks(axis, degrees))
    sent = sum(item.held.part_elements for item in items)
    made = sum(pieces[i].piece_elements for i in owned)
    over = axis.removesuffix(ALONE)
    yield Exchange("momentum to matrices' owners", over, sent * ELEMENT_BYTES)
    yield Exchange("updates from matrices' owners", over, made * ELEMENT_BYTES)


def _owned(work: Sequence[float], ranks: int) -> list[int]:
    """Which the first rank owns: heaviest first to the rank with the least work."""
    order = sorted(range(len(work)), key=work.__getitem__, reverse=True)
    owned, level, dealt = [], 0.0, 0
    # As long as all ranks have the same work, equal pieces go round them in turn.
    while dealt + ranks <= len(order) and work[order[dealt]] == work[order[dealt + ranks - 1]]:
        owned.append(order[dealt])
        level += work[order[dealt]]
        dealt += ranks
    load = [(level, rank) for rank in range(ranks)]
    for index in order[dealt:]:
        held, owner = load[0]
        heapq.heapreplace(load, (held + work[index], owner))
        if owner == 0:
            owned.append(index)
    return sorted(owned)
