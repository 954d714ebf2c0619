"""The legal layouts of a training stage, as arrays.

Legal means: the runtime can run it (schemas/capability.py), every division comes out even, FSDP can share
what tensor and expert parallel leave (held.py), and no more devices are used than there are. Pipeline,
context and tensor degrees divide the number of devices; tensor parallel stays inside the scale-up domain;
data parallel divides the sequences of a step. A layout that leaves more than half of the devices idle is
only offered when none uses more, or when cost is the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from shipway.compiler.held import UNSPLIT, Split
from shipway.compiler.operators.base import Limit, Number
from shipway.compiler.v_orders import least_micro_batches
from shipway.schemas.capability import CAPABILITY, Capability
from shipway.schemas.layout import V_SHAPED, Layout, LayoutConstraints, Recompute, Schedule, Zero

IntArray = npt.NDArray[np.int64]

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULES: tuple[Schedule, ...] = ("none", "1f1b", "interleaved_1f1b", "zbv", "dualpipev")
ZERO: tuple[Zero, ...] = (1, 2, 3)
INTERLEAVED, DUALPIPEV = SCHEDULES.index("interleaved_1f1b"), SCHEDULES.index("dualpipev")
CONTEXT_MULTIPLE = 64
"""A context-parallel slice is a whole number of delta-rule chunks of this many tokens."""


@dataclass(frozen=True)
class Space:
    """What bounds the layouts of one stage."""

    devices: int
    devices_per_node: int
    domain: int
    """Devices joined by scale-up links."""
    sequences: int
    """Sequences of one optimizer step."""
    context: int
    layers: int
    experts: int
    """Routed experts, 0 for a dense model."""
    tied: bool
    """Whether embedding and head share one table."""
    limits: tuple[Limit, ...]
    constraints: LayoutConstraints
    any_size: bool = False
    """Whether layouts that leave most devices idle are of interest."""
    images: bool = False
    """Whether rows have images, which the runtime trains on without tp, cp and pp only."""
    split: Split = UNSPLIT
    """Shapes that FSDP must be able to share."""
    delta_heads: int = 0
    """Heads of delta attention, 0 without."""
    predictions: int = 0
    """Multi-token prediction layers, which no pipeline or slice of a row can hold."""
    capability: Capability = CAPABILITY


@dataclass(frozen=True)
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
        return np.where(
            np.isin(self.schedule, [SCHEDULES.index(name) for name in V_SHAPED]), self.schedule, 0
        )

    def layout(self, index: int, stage_layers: tuple[tuple[int, int], ...] = ()) -> Layout:
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


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Divisors in rising order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))


def degrees(
    pinned: int | None, free: Iterable[int], allowed: Callable[[int], bool] = lambda degree: True
) -> list[int]:
    """The pinned degree alone, where it is allowed, or the free ones."""
    return list(free) if pinned is None else [pinned] if allowed(pinned) else []


def nearest_first(options: Sequence[int], wanted: int) -> tuple[str, ...]:
    """At most eight legal values, nearest to the wanted one first."""
    return tuple(str(v) for v in sorted(options, key=lambda v: (abs(v - wanted), v))[:8])


def limit_allows(limits: Sequence[Limit], axis: str, degree: int) -> bool:
    """Whether every limit of an axis is divisible by `degree`."""
    return all(limit.value % degree == 0 for limit in limits if limit.axis == axis)


def tensor_allowed(space: Space, degree: int) -> bool:
    """Whether a tensor-parallel degree divides all that it must."""
    if space.images and degree > 1:
        return False
    return limit_allows(space.limits, "tp", degree) and space.context % degree == 0


def context_allowed(space: Space, degree: int) -> bool:
    """Whether a context-parallel degree leaves whole slices, 2 x cp of them for causal attention."""
    if degree == 1:
        return True
    return (
        not (space.predictions or space.images)
        and space.context % (2 * degree) == 0
        and context_slices(space.context, degree)
    )


def delta_heads_allowed(space: Space, cp: Number, tp: Number) -> Number:
    """Whether the heads of delta attention can be dealt out over context- and tensor-parallel ranks."""
    return space.delta_heads % (cp * tp) == 0


def context_slices(context: int, degree: int) -> bool:
    """Whether a slice is a whole number of delta-rule chunks."""
    return context // degree % CONTEXT_MULTIPLE == 0


def pipeline_allowed(space: Space, degree: int) -> bool:
    """Whether every pipeline rank has a layer, and nothing would have to stand on two of them."""
    whole = space.tied or space.predictions or space.images
    return degree == 1 or (degree <= space.layers and not whole)


def legal_tensor(space: Space) -> list[int]:
    """Tensor-parallel degrees: inside the scale-up domain unless pinned."""
    free = [d for d in divisors(space.domain) if space.devices % d == 0 and tensor_allowed(space, d)]
    return degrees(space.constraints.tensor_parallel, free, lambda d: tensor_allowed(space, d))


def legal_context(space: Space) -> list[int]:
    """Context-parallel degrees."""
    free = [d for d in divisors(space.devices) if context_allowed(space, d)]
    return degrees(space.constraints.context_parallel, free, lambda d: context_allowed(space, d))


def legal_pipeline(space: Space) -> list[int]:
    """Pipeline degrees."""
    free = [d for d in divisors(space.devices) if pipeline_allowed(space, d)]
    return degrees(space.constraints.pipeline_parallel, free, lambda d: pipeline_allowed(space, d))


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
    zeros = {True: space.capability.zero_with_pipeline, False: space.capability.zero}
    rows: list[tuple[int, ...]] = []
    for index in range(len(cores)):
        pp, cp, tp, ep = (int(getattr(cores, name)[index]) for name in ("pp", "cp", "tp", "ep"))
        data = int(cores.replicate[index] * cores.shard[index])
        levels = degrees(space.constraints.zero, zeros[pp > 1])
        rows += [
            (index, mesh[1], mesh[2], zero)
            for mesh in _splits(space, pp, data, cp, tp)
            if expert_allowed(space, ep, mesh[2] * cp * tp)
            for zero in levels
        ]
    which, replicate, shard, zero = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return replace(cores.take(which), replicate=replicate, shard=shard, zero=zero), which


def _candidates(table: IntArray) -> Candidates:
    pp, replicate, shard, cp, tp, ep, micro_batch, micro_batches, virtual, schedule, zero, recompute = table.T
    return Candidates(
        pp, virtual, replicate, shard, cp, tp, ep, zero, schedule, recompute, micro_batch, micro_batches
    )


def legal_meshes(space: Space, *, widest: bool = False, experts: bool = True) -> IntArray:
    """Rows of (pp, replicate, shard, cp, tp, ep), the last only with `experts`."""
    meshes = _meshes(space, widest)
    if not space.any_size and len(meshes):
        world = meshes.prod(axis=1)
        meshes = meshes[2 * world > min(space.devices, 2 * world.max() - 1)]
    return _with_experts(space, meshes, widest) if experts else meshes


def count_layouts(space: Space) -> int:
    """Number of legal layouts, without listing them.

    What follows a mesh depends on pp and data alone; the splits of data parallel and the expert degrees
    depend on data, cp and tp alone.
    """
    table = legal_meshes(space, widest=True, experts=False)
    if not len(table):
        return 0
    pp, data = table[:, 0], table[:, 1] * table[:, 2]
    ones = np.ones_like(pp)
    keys = np.unique(np.column_stack([pp, data]), axis=0)
    probe = np.column_stack([keys[:, 0], ones[: len(keys)], keys[:, 1], *[ones[: len(keys)]] * 3])
    rest = _with_policies(space, _with_schedules(space, _with_micro_batches(space, probe)))
    found, following = np.unique(rest[:, [0, 2]], axis=0, return_counts=True)
    after = {tuple(key): int(n) for key, n in zip(found.tolist(), following, strict=True)}
    meshes, which = np.unique(np.column_stack([data, table[:, 3:5]]), axis=0, return_inverse=True)
    before = _count_splits(space, meshes)[which.reshape(-1)]
    follows = [after.get(key, 0) for key in zip(pp.tolist(), data.tolist(), strict=True)]
    return int(before @ np.array(follows))


def _count_splits(space: Space, meshes: IntArray) -> IntArray:
    """Ways to split data parallel and to choose an expert degree, for rows of (data, cp, tp)."""
    rows = [
        (index, mesh[2] * cp * tp)
        for index, (data, cp, tp) in enumerate(meshes.tolist())
        for mesh in _splits(space, 1, data, cp, tp)
    ]
    which, region = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    counts = np.zeros(len(meshes), dtype=np.int64)
    for degree in expert_degrees(space):
        allowed = experts_allowed(space, np.full_like(region, degree), region)
        counts += np.bincount(which[allowed], minlength=len(meshes))
    return counts


def expert_degrees(space: Space) -> list[int]:
    """Expert-parallel degrees that divide the experts."""
    if not space.experts:
        return degrees(space.constraints.expert_parallel, [1], lambda degree: degree == 1)
    legal = [d for d in divisors(space.experts) if limit_allows(space.limits, "ep", d)]
    return degrees(space.constraints.expert_parallel, legal, lambda degree: degree in legal)


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


def _meshes(space: Space, widest: bool = False) -> IntArray:
    """Rows of (pp, replicate, shard, cp, tp)."""
    batch_divisors = divisors(space.sequences)
    rows = []
    for tp in legal_tensor(space):
        for cp in legal_context(space):
            if space.context % (cp * tp) or tp * cp > space.devices:
                continue
            if space.constraints.delta_context == "heads" and not delta_heads_allowed(space, cp, tp):
                continue
            for pp in legal_pipeline(space):
                room = space.devices // (pp * cp * tp)
                for data in batch_divisors:
                    if data > room:
                        break
                    world = pp * cp * tp * data
                    if world % space.devices_per_node and space.devices_per_node % world:
                        continue
                    split = _splits(space, pp, data, cp, tp)
                    rows += split[-1:] if widest else split
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


def _splits(space: Space, pp: int, data: int, cp: int, tp: int) -> list[tuple[int, ...]]:
    """Ways to divide data parallel into replicas and shards, the most shards last."""
    pins = space.constraints
    if pins.data_parallel_shard is not None:
        shards = [s for s in (pins.data_parallel_shard,) if data % s == 0]
    else:
        shards = list(divisors(data))
    pinned = pins.data_parallel_replicate
    return [
        (pp, data // s, s, cp, tp)
        for s in shards
        if (pinned is None or data // s == pinned) and space.split.shares_dense(tp, s * cp)
    ]


def _cross(table: IntArray, options: Sequence[tuple[int, ...]], width: int) -> IntArray:
    """Every row of `table` with every option, a tuple of `width` numbers."""
    right = np.array(options, dtype=np.int64).reshape(-1, width)
    return np.hstack([np.repeat(table, len(right), axis=0), np.tile(right, (len(table), 1))])


def _with_experts(space: Space, table: IntArray, widest: bool) -> IntArray:
    table = _cross(table, [(degree,) for degree in expert_degrees(space)], 1)
    region = table[:, 2] * table[:, 3] * table[:, 4]
    allowed = experts_allowed(space, table[:, 5], region)
    if widest:
        # Where the widest split will not do, a narrower one may.
        for row in np.flatnonzero(~allowed & (region >= table[:, 5])):
            pp, replicate, shard, cp, tp, ep = table[row].tolist()
            for mesh in reversed(_splits(space, pp, replicate * shard, cp, tp)):
                if expert_allowed(space, ep, mesh[2] * cp * tp):
                    table[row, :5], allowed[row] = mesh, True
                    break
    legal: IntArray = table[allowed]
    return legal


def expert_allowed(space: Space, degree: int, region: int) -> bool:
    """Whether an expert degree divides its region of dp_shard x cp x tp, and FSDP can share the rest."""
    return region % degree == 0 and space.split.shares_experts(degree, region // degree)


def experts_allowed(space: Space, degrees: IntArray, region: IntArray) -> npt.NDArray[np.bool_]:
    """`expert_allowed` of each entry."""
    divides: npt.NDArray[np.bool_] = region % degrees == 0
    pairs, which = np.unique(np.column_stack([degrees, region]), axis=0, return_inverse=True)
    shared = np.array([expert_allowed(space, degree, ranks) for degree, ranks in pairs.tolist()], dtype=bool)
    result: npt.NDArray[np.bool_] = divides & shared[which.reshape(-1)]
    return result


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
    pins, can = space.constraints, space.capability
    policies = [pins.recompute] if pins.recompute is not None else list(can.recompute)

    def options(offered: tuple[int, ...]) -> list[tuple[int, int]]:
        levels = degrees(pins.zero, [max(offered)] if widest else offered, lambda level: level in offered)
        return [(zero, RECOMPUTE.index(policy)) for zero in levels for policy in policies]

    several = table[:, 0] > 1
    return np.vstack(
        [
            _cross(table[~several], options(can.zero), 2),
            _cross(table[several], options(can.zero_with_pipeline), 2),
        ]
    )
