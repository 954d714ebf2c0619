"""The legal layouts of a training stage, as arrays.

Legal means: the runtime can run it (schemas/capability.py), every division comes out even, FSDP can share
what tensor and expert parallel leave (held.py), and no more devices are used than there are. Pipeline,
context and tensor degrees divide the number of devices; tensor parallel stays inside the scale-up domain;
data parallel divides the sequences of a step. A layout that leaves more than half of the devices idle is
only offered when none uses more, or when cost is the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.compiler.meshes import legal_meshes, meshes
from shipway.compiler.space import Space, degrees, divisors
from shipway.compiler.unique import first_rows
from shipway.compiler.v_orders import least_micro_batches
from shipway.schemas.layout import ACTIVATION_OFFLOAD, V_SHAPED, Layout, Offload, Recompute, Schedule, Zero

IntArray = npt.NDArray[np.int64]

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULES: tuple[Schedule, ...] = ("none", "1f1b", "interleaved_1f1b", "zbv", "dualpipev")
ZERO: tuple[Zero, ...] = (1, 2, 3)
V_SCHEDULE = np.array([index if name in V_SHAPED else 0 for index, name in enumerate(SCHEDULES)])
"""Of each schedule its own index where it is V-shaped, else 0."""
INTERLEAVED, DUALPIPEV = SCHEDULES.index("interleaved_1f1b"), SCHEDULES.index("dualpipev")


@frozen
class Candidates:
    """Layouts as arrays of one length."""

    pp: IntArray
    virtual: IntArray
    replicate: IntArray
    shard: IntArray
    cp: IntArray
    tp: IntArray
    ep: IntArray
    zero: IntArray
    schedule: IntArray
    """Index into SCHEDULES."""
    recompute: IntArray
    """Index into RECOMPUTE."""
    micro_batch: IntArray
    micro_batches: IntArray

    def __len__(self) -> int:
        return len(self.pp)

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Candidates:
        """The layouts at `index`."""
        return Candidates(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def world(self) -> IntArray:
        """Devices used."""
        return self.pp * self.replicate * self.shard * self.cp * self.tp

    @property
    def chunks(self) -> IntArray:
        """Model chunks."""
        return self.pp * self.virtual

    @property
    def v_schedule(self) -> IntArray:
        """The schedule where it is V-shaped, else 0: what sets the place of chunks, with their number."""
        return V_SCHEDULE[self.schedule]

    def layout(
        self, index: int, stage_layers: tuple[tuple[int, int], ...] = (), offload: Offload = "none"
    ) -> Layout:
        """One layout as its schema has it."""
        return Layout(
            pipeline_parallel=int(self.pp[index]),
            virtual_stages=int(self.virtual[index]),
            data_parallel_replicate=int(self.replicate[index]),
            data_parallel_shard=int(self.shard[index]),
            context_parallel=int(self.cp[index]),
            tensor_parallel=int(self.tp[index]),
            expert_parallel=int(self.ep[index]),
            zero=ZERO[int(self.zero[index]) - 1],
            schedule=SCHEDULES[self.schedule[index]],
            recompute=RECOMPUTE[self.recompute[index]],
            micro_batch=int(self.micro_batch[index]),
            micro_batches=int(self.micro_batches[index]),
            offload=offload,
            stage_layers=stage_layers,
        )


def joined(parts: Sequence[Candidates]) -> Candidates:
    """Several lists of layouts as one."""
    return Candidates(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Candidates))
    )


def sort_keys(candidates: Candidates) -> tuple[IntArray, ...]:
    """Columns that order layouts by simplicity, for lexsort: the last is the most important."""
    c = candidates
    return (c.micro_batch, c.recompute, -c.zero, c.replicate, c.schedule, c.virtual, c.ep, c.cp, c.tp, c.pp)


def from_layout(layout: Layout) -> Candidates:
    """One layout as arrays of length one."""
    values = (
        layout.pipeline_parallel,
        layout.virtual_stages,
        layout.data_parallel_replicate,
        layout.data_parallel_shard,
        layout.context_parallel,
        layout.tensor_parallel,
        layout.expert_parallel,
        layout.zero,
        SCHEDULES.index(layout.schedule),
        RECOMPUTE.index(layout.recompute),
        layout.micro_batch,
        layout.micro_batches,
    )
    return Candidates(*(np.array([value], dtype=np.int64) for value in values))


Keep = Callable[[Candidates], npt.NDArray[np.bool_]]


def enumerate_layouts(space: Space, keep: Keep | None = None, *, widest: bool = False) -> Candidates:
    """All legal layouts of a stage; empty when the constraints leave none.

    `keep` may rule layouts out early: it is asked first about meshes (micro-batches, schedules and
    policies not yet chosen, and at their least demanding), then about meshes with micro-batches.
    With `widest`, layouts that differ only in how widely states are sharded (the split of data parallel
    into replicas and shards, the ZeRO level) are represented by the one that shards most.
    """
    table = legal_meshes(space, widest=widest)
    if keep is not None and len(table):
        table = table[keep(_partial(table))]
    table = _with_micro_batches(space, table)
    if keep is not None and len(table):
        table = table[keep(_partial(table))]
    table = _with_policies(space, _with_schedules(space, table), widest=widest)
    return _candidates(table)


def splits(space: Space, cores: Candidates) -> tuple[Candidates, IntArray]:
    """All layouts that the widest ones stand for, and which one each belongs to."""
    made = meshes(space)
    which, way = made.ways(made.block_of(cores.replicate * cores.shard, cores.cp, cores.tp))
    column = np.searchsorted(made.experts, cores.ep)
    legal = made.allowed[way, column[which]]
    which, way = which[legal], way[legal]
    which, way, zero = _with_levels(space, cores.pp > 1, which, way)
    return replace(cores.take(which), replicate=made.replicate[way], shard=made.shard[way], zero=zero), which


def _with_levels(
    space: Space, piped: npt.NDArray[np.bool_], which: IntArray, way: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Every core and way under every ZeRO level that its pipeline allows."""
    offered = space.capability.zero, space.capability.zero_with_pipeline
    levels = [np.array(degrees(space.constraints.zero, some), dtype=np.int64) for some in offered]
    counts = np.array([len(some) for some in levels])[piped[which].astype(int)]
    row = np.repeat(np.arange(len(which)), counts)
    number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    which, way = which[row], way[row]
    zero = np.empty(len(which), dtype=np.int64)
    for mine, some in zip((~piped[which], piped[which]), levels, strict=True):
        zero[mine] = some[number[mine]]
    return which, way, zero


def _candidates(table: IntArray) -> Candidates:
    pp, replicate, shard, cp, tp, ep, micro_batch, micro_batches, virtual, schedule, zero, recompute = table.T
    return Candidates(
        pp, virtual, replicate, shard, cp, tp, ep, zero, schedule, recompute, micro_batch, micro_batches
    )


def count_layouts(space: Space) -> int:
    """Number of legal layouts, without listing them.

    What follows a mesh depends on pp and data alone; the splits of data parallel and the expert degrees
    depend on data, cp and tp alone.
    """
    made = meshes(space)
    if not len(made.pp):
        return 0
    first, which = first_rows(made.pp, made.data[made.block])
    ones = np.ones(len(first), dtype=np.int64)
    probe = np.column_stack(
        [made.pp[first], ones, made.data[made.block][first], ones, ones, np.arange(len(first))]
    )
    rest = _with_schedules(space, _with_micro_batches(space, probe))
    policies = np.where(rest[:, 0] > 1, *(len(_policies(space, piped)) for piped in (True, False)))
    after = np.bincount(rest[:, 5], policies, minlength=len(first)).astype(np.int64)
    return int(made.choices()[made.block] @ after[which])


def _partial(table: IntArray) -> Candidates:
    """Rows not yet complete as candidates: the undecided at their least demanding (full recomputation)."""
    ones = np.ones(len(table), dtype=np.int64)
    decided = table.shape[1] > 6
    return Candidates(
        pp=table[:, 0],
        virtual=ones,
        replicate=table[:, 1],
        shard=table[:, 2],
        cp=table[:, 3],
        tp=table[:, 4],
        ep=table[:, 5],
        zero=np.where(table[:, 0] > 1, 2, 3),
        schedule=ones,
        recompute=ones * RECOMPUTE.index("full"),
        micro_batch=table[:, 6] if decided else 0 * ones,
        micro_batches=table[:, 7] if decided else ones,
    )


def _cross(table: IntArray, options: Sequence[tuple[int, ...]], width: int) -> IntArray:
    """Every row of `table` with every option, a tuple of `width` numbers."""
    right = np.array(options, dtype=np.int64).reshape(-1, width)
    return np.hstack([np.repeat(table, len(right), axis=0), np.tile(right, (len(table), 1))])


def _with_micro_batches(space: Space, table: IntArray) -> IntArray:
    pinned = space.constraints.micro_batch
    table = _cross(table, [(size,) for size in degrees(pinned, divisors(space.sequences))], 1)
    data = table[:, 1] * table[:, 2]
    per_rank = space.sequences // data
    table, per_rank = table[per_rank % table[:, 6] == 0], per_rank[per_rank % table[:, 6] == 0]
    count = per_rank // table[:, 6]
    table = np.column_stack([table, count])
    # A pipeline with fewer micro-batches than ranks never fills.
    filled: IntArray = table[count >= table[:, 0]]
    return filled


def _with_schedules(space: Space, table: IntArray) -> IntArray:
    pins, can = space.constraints, space.capability
    names = [name for name in SCHEDULES if name == "none" or name in can.schedules]
    names = [name for name in names if pins.schedule in (None, name)]
    deepest = max(1, min(can.virtual_stages, space.layers // 2))
    chunks = degrees(pins.virtual_stages, range(1, deepest + 1))
    alone = [(1, 0)] if 1 in chunks and "none" in names else []
    piped = [
        (virtual, SCHEDULES.index(name)) for virtual in chunks for name in names if _holds(name, virtual)
    ]
    several = table[:, 0] > 1
    single = table[~several]
    table = _cross(table[several], piped, 2)
    pp, count, virtual, schedule = table[:, 0], table[:, 7], table[:, 8], table[:, 9]
    dealt = (schedule != INTERLEAVED) | (count % np.maximum(count // pp, 1) == 0)
    filled = (schedule != DUALPIPEV) | (count >= least_micro_batches("dualpipev", pp))
    table = table[(pp * virtual <= space.layers) & dealt & filled]
    return np.vstack([_cross(single, alone, 2), table])


def _holds(schedule: Schedule, virtual: int) -> bool:
    """Whether a schedule of several ranks puts so many chunks on each."""
    return {"none": False, "1f1b": virtual == 1, "interleaved_1f1b": virtual > 1}.get(schedule, virtual == 2)


def _with_policies(space: Space, table: IntArray, *, widest: bool = False) -> IntArray:
    several = table[:, 0] > 1
    return np.vstack(
        [
            _cross(table[mine], _policies(space, piped, widest=widest), 2)
            for mine, piped in ((~several, False), (several, True))
        ]
    )


def _policies(space: Space, piped: bool, *, widest: bool = False) -> list[tuple[int, int]]:
    """ZeRO levels with recomputation policies; of the levels only the highest with `widest`."""
    pins, can = space.constraints, space.capability
    offered = can.zero_with_pipeline if piped else can.zero
    recompute = [pins.recompute] if pins.recompute is not None else list(can.recompute)
    if space.offload in ACTIVATION_OFFLOAD:
        recompute = [policy for policy in recompute if policy == "full"]
    levels = degrees(pins.zero, [max(offered)] if widest else offered, lambda level: level in offered)
    return [(zero, RECOMPUTE.index(policy)) for zero in levels for policy in recompute]
