"""The ledger of collectives of one layout: what the busiest rank sends in one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shipway.compiler.communication import algorithm
from shipway.compiler.evaluate import (
    EXPOSED,
    Group,
    Tables,
    groups_of,
    handed_over,
    replicate_seconds,
    send_seconds,
)
from shipway.compiler.evaluate_parts import transfer_seconds
from shipway.compiler.fabric import path
from shipway.compiler.layouts import RECOMPUTE, Candidates
from shipway.compiler.problem import Problem
from shipway.schemas.layout import Recompute
from shipway.schemas.plan import Collective


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
    def rows_on_busiest(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """How often each row occurs on the busiest rank."""
        counts = self.group.chunked.counts[0].reshape(-1, self.group.pp, self.group.chunked.counts.shape[2])
        return counts.sum(axis=0)[self.busiest]


def ledger(chosen: Chosen) -> tuple[Collective, ...]:
    """All collectives, the longest first."""
    entries = [*_of_operators(chosen), *_of_sharding(chosen), *_of_replicas(chosen), *_of_pipeline(chosen)]
    merged = _merge(entries)
    return tuple(sorted(merged, key=lambda entry: (-entry.seconds, entry.name)))


def _merge(entries: list[Collective]) -> list[Collective]:
    """One line for calls that differ in nothing but which layer makes them."""
    found: dict[tuple[object, ...], Collective] = {}
    for entry in entries:
        key = (entry.name, entry.axis, entry.collective, entry.bytes, entry.note)
        held = found.get(key)
        if held is not None:
            entry = held.model_copy(
                update={
                    "count": held.count + entry.count,
                    "seconds": held.seconds + entry.seconds,
                    "exposed_seconds": held.exposed_seconds + entry.exposed_seconds,
                }
            )
        found[key] = entry
    return [entry for entry in found.values() if entry.group_size > 1 and entry.count > 0]


def _line(
    chosen: Chosen,
    name: str,
    axis: str,
    collective: str,
    size_bytes: float,
    count: float,
    seconds: float,
    exposed: float,
    note: str,
) -> Collective:
    size, stride = _groups(chosen)[axis]
    far = bool(path(chosen.problem.network.fabric, size, stride).crosses_network)
    return Collective.model_validate(
        {
            "name": name,
            "axis": axis,
            "collective": collective,
            "group_size": size,
            "bytes": round(size_bytes),
            "count": round(count),
            "algorithm": algorithm(collective),
            "link": "network" if far else "scale-up",
            "seconds": seconds,
            "exposed_seconds": min(exposed, seconds),
            "note": note,
        }
    )


def _groups(chosen: Chosen) -> dict[str, tuple[int, int]]:
    groups = groups_of(chosen.candidate)
    return {axis: (int(size[0]), int(stride[0])) for axis, (size, stride) in groups.items()}


def _of_operators(chosen: Chosen) -> list[Collective]:
    problem, cells = chosen.problem, chosen.shared.cells
    shard = cells.shard(problem.machine.element_bytes, problem.fused)
    cell = int(chosen.shared.cell_of[0])
    policy: Recompute = RECOMPUTE[int(chosen.candidate.recompute[0])]
    micro_batches = int(chosen.candidate.micro_batches[0])
    entries = []
    for row, repeats in zip(problem.work.rows, chosen.rows_on_busiest, strict=True):
        if not repeats:
            continue
        for _, operator in row.operators():
            for transfer in operator.transfers(shard):
                again = policy == "full" and row.recomputable and transfer.phase == "forward"
                count = repeats * micro_batches * (2 if again else 1)
                each = _at(transfer_seconds(transfer, cells, problem.network), cell)
                entries.append(
                    _line(
                        chosen,
                        transfer.name,
                        transfer.axis,
                        transfer.collective,
                        _at(transfer.bytes, cell),
                        count,
                        each * count,
                        each * count,
                        "again when backward recomputes" if again else "in the layer's critical path",
                    )
                )
    return entries


def _at(value: object, cell: int) -> float:
    array = np.asarray(value, dtype=float)
    return float(array if array.ndim == 0 else array[cell])


def _of_sharding(chosen: Chosen) -> list[Collective]:
    states, sharding = chosen.shared.states, int(chosen.shared.sharding_of[0])
    sizes, candidate = chosen.shared.sizes, chosen.candidate
    piped = chosen.group.pp > 1
    micro_batches = int(candidate.micro_batches[0])
    gathers = 1 if piped else micro_batches * (2 if candidate.zero[0] == 3 else 1)
    reductions = 1 if piped else micro_batches
    total = float(chosen.rows_on_busiest @ (states.gather_seconds[:, sharding] * gathers))
    total += float(chosen.rows_on_busiest @ (states.reduce_seconds[:, sharding] * reductions))
    exposed = float(chosen.group.time[EXPOSED][0])
    share = min(exposed / total, 1.0) if total else 0.0
    groups = _groups(chosen)
    entries = []
    for index, repeats in enumerate(chosen.rows_on_busiest):
        if not repeats:
            continue
        expert = float(states.expert_bytes[index, sharding])
        dense = float(states.dense_bytes[index, sharding])
        expert_gradient = float(states.expert_numel[index, sharding]) * sizes.gradient
        gradient = float(states.whole_numel[index, sharding]) * sizes.gradient - expert_gradient
        for axis, what, gathered, reduced in (
            ("dp_shard", "dense parameters", dense, gradient),
            ("expert_shard", "expert parameters", expert, expert_gradient),
        ):
            if not gathered:
                continue
            for name, collective, size_bytes, count, hidden in (
                (f"{what}", "all_gather", gathered, gathers, "under the layer before"),
                (
                    f"gradients of {what}",
                    "reduce_scatter",
                    reduced,
                    reductions,
                    "after a chunk's last backward" if piped else "under the next layer's backward",
                ),
            ):
                size, stride = groups[axis]
                each = float(chosen.problem.network.collective_seconds(collective, size_bytes, size, stride))
                seconds = each * count * repeats
                entries.append(
                    _line(
                        chosen,
                        name,
                        axis,
                        collective,
                        size_bytes,
                        count * repeats,
                        seconds,
                        seconds * share,
                        hidden,
                    )
                )
    return entries


def _of_replicas(chosen: Chosen) -> list[Collective]:
    sharding = chosen.shared.sharding_of
    seconds = replicate_seconds(chosen.problem, chosen.group.chunked)[:, 0]
    shard = chosen.shared.states.shard_numel[:, int(sharding[0])] * chosen.shared.sizes.gradient
    entries = []
    for index, repeats in enumerate(chosen.rows_on_busiest):
        if repeats and shard[index]:
            time = float(seconds[index] * repeats)
            entries.append(
                _line(
                    chosen,
                    "gradient shards between replicas",
                    "dp_replicate",
                    "all_reduce",
                    float(shard[index]),
                    repeats,
                    time,
                    time if chosen.group.pp > 1 else 0.0,
                    "once a step, after the reduction",
                )
            )
    return entries


def _of_pipeline(chosen: Chosen) -> list[Collective]:
    pp = chosen.group.pp
    if pp == 1:
        return []
    candidate = chosen.candidate
    received, _ = handed_over(chosen.group.chunked)
    each = float(send_seconds(chosen.problem, chosen.group.chunked)[0])
    virtual = chosen.group.chunks // pp
    count = 2 * virtual * int(candidate.micro_batches[0])
    exposed = min(each * count, each * count)
    return [
        _line(
            chosen,
            "hidden states and their gradients",
            "pp",
            "send_receive",
            float(received.max()),
            count,
            each * count,
            exposed,
            "partly under other micro-batches' work",
        )
    ]
