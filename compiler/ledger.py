"""The ledger of collectives of one layout: what the busiest rank sends in one optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shipway.compiler.chunked import groups_of, handed_over
from shipway.compiler.communication import algorithm
from shipway.compiler.evaluate import Group
from shipway.compiler.evaluate_parts import seconds_under
from shipway.compiler.fabric import path
from shipway.compiler.frozen import frozen
from shipway.compiler.held import Degrees
from shipway.compiler.layouts import RECOMPUTE, Candidates
from shipway.compiler.ledger_states import ChunkStates, chunk_states
from shipway.compiler.ledger_step import once_a_step
from shipway.compiler.operators.base import Operator, Shard
from shipway.compiler.operators.latent_attention import LatentAttention
from shipway.compiler.operators.router import Router
from shipway.compiler.problem import Problem
from shipway.compiler.step_time import EXPOSED
from shipway.compiler.tables import Tables
from shipway.schemas.layout import Recompute
from shipway.schemas.plan import Collective
from shipway.schemas.training import Muon

Floats = npt.NDArray[np.float64]


@frozen(eq=False)
class Chosen:
    """One layout with everything known about it; arrays hold this layout alone."""

    problem: Problem
    candidate: Candidates
    shared: Tables
    group: Group

    @cached_property
    def busiest(self) -> int:
        """Pipeline rank with the most work."""
        parts, cell = self.shared.parts, self.shared.cell_of[0]
        policy = int(self.candidate.recompute[0])
        seconds = parts.forward[:, cell] + parts.backward[policy, :, cell]
        per_chunk = self.group.chunked.counts[0] @ seconds
        return int(per_chunk.reshape(-1, self.group.pp).sum(axis=0).argmax())

    @property
    def rows_on_busiest(self) -> Floats:
        """How often each row occurs on the busiest rank."""
        counts = self.group.chunked.counts[0].reshape(-1, self.group.pp, self.group.chunked.counts.shape[2])
        rows: Floats = counts.sum(axis=0)[self.busiest]
        return rows

    @property
    def columns_on_busiest(self) -> tuple[int, ...]:
        """Columns of the busiest rank's chunks (see `chunked`)."""
        return tuple(range(self.busiest, self.group.chunks, self.group.pp))

    @property
    def chunks_on_busiest(self) -> tuple[int, ...]:
        """Model chunks of the busiest rank, in model order."""
        order = self.group.chunked.order
        return tuple(int(order[column]) for column in self.columns_on_busiest)

    @cached_property
    def degrees(self) -> Degrees:
        """Ranks that parameters are divided over."""
        sizes = {axis: int(size[0]) for axis, (size, _) in groups_of(self.candidate).items()}
        return Degrees(
            sizes["tp"], sizes["ep"], sizes["dp_shard"], sizes["expert_shard"], sizes["dp_replicate"]
        )

    @cached_property
    def states(self) -> tuple[ChunkStates, ...]:
        """Parameters of each of the busiest rank's chunks."""
        bounds = self.group.chunked.bounds[0]
        return tuple(
            chunk_states(self.problem.work, int(bounds[c]), int(bounds[c + 1]), self.degrees)
            for c in self.chunks_on_busiest
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return int(self.candidate.micro_batches[0])


@frozen
class Call:
    """A kind of call; calls that differ in nothing but the layer that makes them are one line."""

    name: str
    axis: str
    collective: str
    bytes: int
    note: str
    under_seconds: float = 0.0
    """Of work that is done while one call travels."""
    is_hidden: bool = False
    """Whether compute hides it, as far as the time of a step says: FSDP's own calls."""


Entry = tuple[Call, int]
"""A call, and how often it is made."""


def ledger(chosen: Chosen) -> tuple[Collective, ...]:
    """All collectives, the longest first."""
    counts: dict[Call, int] = {}
    for entries in (_of_operators, _of_states, _once_a_step, _of_pipeline):
        for call, count in entries(chosen):
            counts[call] = counts.get(call, 0) + count
    groups = _groups(chosen.candidate)
    kept = {
        call: count for call, count in counts.items() if groups[call.axis][0] > 1 and count and call.bytes
    }
    seconds = _seconds(chosen.problem, kept, groups)
    fab = chosen.problem.network.fabric
    far = {axis: bool(path(fab, *group).crosses_network) for axis, group in groups.items()}
    hidden = sum(seconds[call] for call in kept if call.is_hidden)
    share = min(float(chosen.group.time[EXPOSED][0]) / hidden, 1.0) if hidden else 0.0
    lines = [
        Collective.model_validate(
            {
                "name": call.name,
                "axis": call.axis,
                "collective": call.collective,
                "group_size": groups[call.axis][0],
                "stride": groups[call.axis][1],
                "bytes": call.bytes,
                "count": count,
                "algorithm": algorithm(call.collective),
                "link": "network" if far[call.axis] else "scale-up",
                "seconds": seconds[call],
                "exposed_seconds": max(seconds[call] - count * call.under_seconds, 0.0)
                * (share if call.is_hidden else 1.0),
                "note": call.note,
            }
        )
        for call, count in kept.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.seconds, line.name, line.bytes)))


def _seconds(
    problem: Problem, counts: Mapping[Call, int], groups: Mapping[str, tuple[int, int]]
) -> dict[Call, float]:
    """Seconds of all calls of each kind."""
    seconds: dict[Call, float] = {}
    for collective in {call.collective: None for call in counts}:
        calls = [call for call in counts if call.collective == collective]
        sizes = np.array([call.bytes for call in calls])
        size, stride = np.array([groups[call.axis] for call in calls]).T
        each = problem.network.collective_seconds(collective, sizes, size, stride)
        seconds |= {call: counts[call] * one for call, one in zip(calls, each.tolist(), strict=True)}
    return seconds


def _groups(candidate: Candidates) -> dict[str, tuple[int, int]]:
    """(size, stride) of every group that a step communicates over."""
    groups = {axis: (int(size[0]), int(stride[0])) for axis, (size, stride) in groups_of(candidate).items()}
    inner = int(candidate.cp[0] * candidate.tp[0])
    groups["data"] = (int(candidate.shard[0]), inner)
    groups["dp_shard x tp"] = (groups["dp_shard"][0] * groups["tp"][0], 1)
    return groups


def _of_operators(chosen: Chosen) -> Iterator[Entry]:
    problem, cells = chosen.problem, chosen.shared.cells
    shard = cells.shard(problem.machine, problem.fused)
    policy = RECOMPUTE[int(chosen.candidate.recompute[0])]
    # Many rows have the same operators: their calls are asked for once.
    placed: dict[tuple[Operator, bool], float] = {}
    for row, repeats in zip(problem.work.rows, chosen.rows_on_busiest.tolist(), strict=True):
        for _, operator in row.operators() if repeats else ():
            key = operator, row.recomputable
            placed[key] = placed.get(key, 0.0) + repeats
    for (operator, recomputable), repeats in placed.items():
        for call, count, is_repeat in _calls(chosen, operator, shard, policy):
            if recomputable or not is_repeat:
                yield call, count * round(repeats) * chosen.micro_batches


def _calls(
    chosen: Chosen, operator: Operator, shard: Shard, policy: Recompute
) -> Iterator[tuple[Call, int, bool]]:
    """Calls of one micro-batch, how many, and whether they are made again by recomputation."""
    machine, optimizer = chosen.problem.machine, chosen.problem.blueprint.training.optimizer
    # QK-clip looks at whole keys, which it gathers once more where the attention gathers heads.
    clips = isinstance(optimizer, Muon) and optimizer.qk_clip is not None
    watched = clips and isinstance(operator, LatentAttention) and operator.gathers_heads
    for t in operator.transfers(shard):
        size, count = round(_only(t.bytes)), round(_only(t.calls))
        under = _only(seconds_under(t, machine))
        note = "under the shared experts" if t.under else "in the layer's critical path"
        yield Call(t.name, t.axis, t.collective, size, note, under_seconds=under), count, False
        if watched and t.axis == "cp" and t.collective == "all_gather":
            yield Call(f"{t.name} to watch", t.axis, t.collective, size, "by QK-clip"), count, False
        if round(_only(t.repeats(policy))):
            note = "when backward recomputes"
            again = Call(f"{t.name}, again", t.axis, t.collective, size, note, under_seconds=under)
            yield again, count, True


def _only(value: object) -> float:
    """The one number in an array of one, or a plain number."""
    return float(np.asarray(value, dtype=float).reshape(-1)[0])


def _of_states(chosen: Chosen) -> Iterator[Entry]:
    sizes, zero = chosen.shared.sizes, int(chosen.candidate.zero[0])
    piped = chosen.group.pp > 1
    once, passes = piped or zero == 1, 2 if zero == 3 else 1
    after = "after a chunk's last backward" if piped else "under the next layer's backward"
    for chunk in chosen.states:
        # Layers of one kind share their groups.
        for group, layers in Counter(chunk.groups).items():
            gathers = 1 if once else chosen.micro_batches * (1 if group.is_root else passes)
            reductions = 1 if once else chosen.micro_batches
            ranks = group.held[0].ranks
            part = group.part_elements * sizes.gradient
            gathered = group.gathered_bytes(sizes)
            yield (
                Call(
                    group.name, group.axis, "all_gather", gathered, "under the layer before", is_hidden=True
                ),
                layers * gathers,
            )
            gradients = f"gradients of {group.name}"
            yield (
                Call(gradients, group.axis, "reduce_scatter", part * ranks, after, is_hidden=True),
                layers * reductions,
            )
            note = "once a step, after the reduction"
            yield (
                Call(
                    "gradient shards between replicas",
                    "dp_replicate",
                    "all_reduce",
                    part,
                    note,
                    is_hidden=True,
                ),
                layers,
            )


def _once_a_step(chosen: Chosen) -> Iterator[Entry]:
    problem = chosen.problem
    operators = [
        (operator, round(repeats))
        for row, repeats in zip(problem.work.rows, chosen.rows_on_busiest, strict=True)
        if row.recomputable
        for _, operator in row.operators()
    ]
    for once in once_a_step(
        chosen.states,
        chosen.degrees,
        chosen.shared.sizes,
        problem.blueprint.model,
        problem.blueprint.training,
        routers=sum(n for operator, n in operators if isinstance(operator, Router)),
        latent_layers=sum(n for operator, n in operators if isinstance(operator, LatentAttention)),
    ):
        yield Call(once.name, once.axis, once.collective, once.bytes, "once a step"), once.count


def _of_pipeline(chosen: Chosen) -> Iterator[Entry]:
    """Hidden states come and go forward, their gradients backward; each call is a send or a receive."""
    if chosen.group.pp == 1:
        return
    received, returned = (sizes[0].copy() for sizes in handed_over(chosen.group.chunked))
    if chosen.group.chunked.is_v_shaped:
        # The last rank's two chunks follow one another: nothing is sent between them.
        returned[chosen.group.pp - 1] = received[-1] = 0.0
    note = "partly under other micro-batches' work"
    for chunk in chosen.columns_on_busiest:
        for name, size in (
            ("hidden states received", received[chunk]),
            ("hidden states sent", returned[chunk]),
            ("gradients of hidden states received", returned[chunk]),
            ("gradients of hidden states sent", received[chunk]),
        ):
            yield Call(name, "pp", "send_receive", round(float(size)), note), chosen.micro_batches
