"""The ledger of collectives of one layout: what the busiest rank sends in one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shipway.compiler.chunked import groups_of, handed_over
from shipway.compiler.communication import algorithm
from shipway.compiler.evaluate import Group
from shipway.compiler.evaluate_parts import axis_paths
from shipway.compiler.fabric import path
from shipway.compiler.layouts import RECOMPUTE, Candidates
from shipway.compiler.operators.base import Operator, Transfer
from shipway.compiler.problem import Problem
from shipway.compiler.step_time import EXPOSED, replicate_seconds, send_seconds
from shipway.compiler.tables import Tables
from shipway.schemas.plan import Collective

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Chosen:
    """One layout with everything known about it; arrays hold this layout alone."""

    problem: Problem
    candidate: Candidates
    shared: Tables
    group: Group

    @property
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


@dataclass(frozen=True)
class _Call:
    """A kind of call; calls that differ in nothing but the layer that makes them are one line."""

    name: str
    axis: str
    collective: str
    bytes: int
    note: str


@dataclass
class _Sum:
    count: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0


def ledger(chosen: Chosen) -> tuple[Collective, ...]:
    """All collectives, the longest first."""
    sums: dict[_Call, _Sum] = {}
    for entries in (_of_operators, _of_sharding, _of_replicas, _of_pipeline):
        for call, count, seconds, exposed in entries(chosen):
            line = sums.setdefault(call, _Sum())
            line.count += count
            line.seconds += seconds
            line.exposed += exposed
    groups = {
        axis: (int(size[0]), int(stride[0])) for axis, (size, stride) in groups_of(chosen.candidate).items()
    }
    fab = chosen.problem.network.fabric
    far = {axis: bool(path(fab, *group).crosses_network) for axis, group in groups.items()}
    lines = [
        Collective.model_validate(
            {
                "name": call.name,
                "axis": call.axis,
                "collective": call.collective,
                "group_size": groups[call.axis][0],
                "bytes": call.bytes,
                "count": round(line.count),
                "algorithm": algorithm(call.collective),
                "link": "network" if far[call.axis] else "scale-up",
                "seconds": line.seconds,
                "exposed_seconds": min(line.exposed, line.seconds),
                "note": call.note,
            }
        )
        for call, line in sums.items()
        if groups[call.axis][0] > 1 and line.count
    ]
    return tuple(sorted(lines, key=lambda line: (-line.seconds, line.name, line.bytes)))


Entry = tuple[_Call, float, float, float]
"""A call, how often, its seconds, and how many of them are exposed."""


def _of_operators(chosen: Chosen) -> Iterator[Entry]:
    problem, cells = chosen.problem, chosen.shared.cells
    shard = cells.shard(problem.machine.element_bytes, problem.fused)
    places = axis_paths(cells, problem.network)
    policy = RECOMPUTE[int(chosen.candidate.recompute[0])]
    micro_batches = int(chosen.candidate.micro_batches[0])
    known: dict[Operator, list[tuple[Transfer, float]]] = {}
    for row, repeats in zip(problem.work.rows, chosen.rows_on_busiest, strict=True):
        if not repeats:
            continue
        for _, operator in row.operators():
            if operator not in known:
                known[operator] = [
                    (t, _only(problem.network.seconds_on(places[t.axis], t.collective, t.bytes)))
                    for t in operator.transfers(shard)
                ]
            for transfer, each in known[operator]:
                again = policy == "full" and row.recomputable and transfer.phase == "forward"
                count = float(repeats * micro_batches * (2 if again else 1))
                note = "again when backward recomputes" if again else "in the layer's critical path"
                size = round(_only(transfer.bytes))
                call = _Call(transfer.name, transfer.axis, transfer.collective, size, note)
                yield call, count, each * count, each * count


def _only(value: object) -> float:
    """The one number in an array of one, or a plain number."""
    return float(np.asarray(value, dtype=float).reshape(-1)[0])


def _of_sharding(chosen: Chosen) -> Iterator[Entry]:
    states, sizes, candidate = chosen.shared.states, chosen.shared.sizes, chosen.candidate
    network, piped = chosen.problem.network, chosen.group.pp > 1
    micro_batches = int(candidate.micro_batches[0])
    gathers = 1 if piped else micro_batches * (2 if candidate.zero[0] == 3 else 1)
    reductions = 1 if piped else micro_batches
    rows = chosen.rows_on_busiest
    total = float(rows @ (states.gather_seconds[:, 0] * gathers + states.reduce_seconds[:, 0] * reductions))
    share = min(float(chosen.group.time[EXPOSED][0]) / total, 1.0) if total else 0.0
    groups = groups_of(candidate)
    expert_gradient = states.expert_numel[:, 0] * sizes.gradient
    gradient = states.whole_numel[:, 0] * sizes.gradient - expert_gradient
    after = "after a chunk's last backward" if piped else "under the next layer's backward"
    for axis, what, gathered, reduced in (
        ("dp_shard", "dense parameters", states.dense_bytes[:, 0], gradient),
        ("expert_shard", "expert parameters", states.expert_bytes[:, 0], expert_gradient),
    ):
        for name, collective, sizes_of, count, note in (
            (what, "all_gather", gathered, gathers, "under the layer before"),
            (f"gradients of {what}", "reduce_scatter", reduced, reductions, after),
        ):
            each = network.collective_seconds(collective, sizes_of, *groups[axis])
            for row in np.flatnonzero((rows > 0) & (sizes_of > 0)):
                calls = float(rows[row] * count)
                seconds = float(each[row]) * calls
                call = _Call(name, axis, collective, round(float(sizes_of[row])), note)
                yield call, calls, seconds, seconds * share


def _of_replicas(chosen: Chosen) -> Iterator[Entry]:
    seconds = replicate_seconds(chosen.problem, chosen.group.chunked)[:, 0]
    shard = chosen.shared.states.shard_numel[:, 0] * chosen.shared.sizes.gradient
    rows = chosen.rows_on_busiest
    for row in np.flatnonzero((rows > 0) & (shard > 0)):
        time = float(seconds[row] * rows[row])
        call = _Call(
            "gradient shards between replicas",
            "dp_replicate",
            "all_reduce",
            round(float(shard[row])),
            "once a step, after the reduction",
        )
        yield call, float(rows[row]), time, time if chosen.group.pp > 1 else 0.0


def _of_pipeline(chosen: Chosen) -> Iterator[Entry]:
    pp = chosen.group.pp
    if pp == 1:
        return
    received, _ = handed_over(chosen.group.chunked)
    each = float(send_seconds(chosen.problem, chosen.group.chunked)[0])
    count = 2.0 * (chosen.group.chunks // pp) * int(chosen.candidate.micro_batches[0])
    call = _Call(
        "hidden states and their gradients",
        "pp",
        "send_receive",
        round(float(received.max())),
        "partly under other micro-batches' work",
    )
    yield call, count, each * count, each * count
