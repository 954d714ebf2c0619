"""Turn what the search found into the plan's tables: memory, time, communication, totals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from shipway.compiler.delta_context import with_delta_context
from shipway.compiler.evaluate import evaluate, time_breakdown
from shipway.compiler.host_memory import ACTIVATIONS, PROCESSES, SAVING, STATE, host_capacity
from shipway.compiler.layouts import RECOMPUTE, Candidates
from shipway.compiler.ledger import Chosen, ledger
from shipway.compiler.memory import (
    ALLOCATOR_SLACK_BYTES,
    CUBLAS,
    IN_LAYER,
    OTHER_MOMENTS,
    STAGED_ACTIVATIONS,
    STAGED_STATE,
)
from shipway.compiler.operators.base import Operator, Shard, flops
from shipway.compiler.problem import Problem
from shipway.compiler.search import Found, verdict
from shipway.compiler.simulated import simulated_seconds
from shipway.compiler.step_time import COPIES, PASSES
from shipway.compiler.tables import Tables, tables
from shipway.schemas.plan import (
    Alternative,
    HostMemory,
    MemoryBudget,
    MemoryItem,
    StageMemory,
    StagePlan,
    TimeItem,
)

RUNNERS_UP = 5
"""Alternatives that a plan keeps."""

CATEGORY = {
    "master weights": "parameters",
    "gathered parameters": "parameters",
    "gradients, sharded": "gradients",
    "gradients, whole until the last micro-batch": "gradients",
    "optimizer state": "optimizer",
    "moving average of weights": "optimizer",
    "routers' counters": "parameters",
    "kept activations": "activations",
    "temporaries of one layer": "scratch",
    "optimizer temporaries": "scratch",
    CUBLAS: "scratch",
    OTHER_MOMENTS: "scratch",
    STAGED_STATE: "scratch",
    STAGED_ACTIVATIONS: "scratch",
    "gradient reduction buffers": "communication",
    "pipeline receive buffers": "communication",
    "allocator rounding and fragmentation": "scratch",
    "device context": "outside",
    "libraries and kernels' modules": "outside",
    "communicators": "outside",
    STATE: "optimizer",
    ACTIVATIONS: "activations",
    SAVING: "scratch",
    PROCESSES: "outside",
}
NOTES = {
    "kept activations": "micro-batches in flight at this pipeline rank, at the planned expert load",
    "temporaries of one layer": "its backward's operations in order, with gradients and what is recomputed",
    "gathered parameters": "in compute precision, as FSDP holds them at that moment",
    "pipeline receive buffers": "torch allocates one per micro-batch of the step",
    "libraries and kernels' modules": "assumed; measured once per device",
    "communicators": "NCCL buffers, one communicator per group of more than one rank",
    "allocator rounding and fragmentation": "partly used pages, with expandable segments",
    OTHER_MOMENTS: "what is freed serves its own stream: sums of gradients and gathers have theirs",
    CUBLAS: "of the threads that run forward and backward",
    "routers' counters": "loads, and margins for quantile balancing",
    STAGED_STATE: "one is updated while the next arrives",
    STAGED_ACTIVATIONS: "two layers' inputs at a time",
    STATE: "pinned",
    ACTIVATIONS: "pinned, in blocks of a power of two bytes",
    SAVING: "while a save is in flight",
    PROCESSES: "assumed: interpreter, libraries, data workers",
    "optimizer temporaries": "foreach temporaries and the largest matrix being orthogonalised",
}


def choose(problem: Problem, candidate: Candidates, shared: Tables | None = None) -> Chosen:
    """Everything about one layout, the passes of a pipeline run action by action."""
    own = shared or tables(problem, candidate)
    group = evaluate(problem, candidate, own).groups[0]
    if group.pp > 1:
        time = {**group.time, PASSES: np.array([simulated_seconds(problem, group.chunked)])}
        group = replace(group, time=time, step_seconds=sum(time.values(), np.zeros(1)))
    return Chosen(problem, candidate, own, group)


def stage_plan(problem: Problem, found: Found) -> StagePlan:
    """The plan of one stage; `found.best` must not be None."""
    assert found.best is not None
    chosen = choose(problem, found.candidates.take(np.array([found.best])), found.tables_of(found.best))
    stage, space = problem.stage, problem.space
    step = float(chosen.group.step_seconds[0])
    model_flops, hardware_flops = flops_per_token(problem, int(chosen.candidate.recompute[0]))
    devices = int(chosen.candidate.world[0])
    rate = problem.tokens_per_step / step
    peak = devices * problem.machine.peak_flops
    hours = stage.steps * step / 3600
    bounds = chosen.group.chunked.bounds[0].tolist()
    return StagePlan(
        name=stage.name,
        context_tokens=stage.context,
        tokens=stage.tokens,
        steps=stage.steps,
        sequences_per_step=space.sequences,
        layout=with_delta_context(
            problem, chosen.candidate.layout(0, tuple(pairwise(bounds)), space.offload)
        ),
        devices_used=devices,
        memory=stage_memory(chosen),
        communication=ledger(chosen),
        time=time_items(chosen),
        step_seconds=step,
        tokens_per_second=rate,
        model_flops_per_token=model_flops,
        mfu=rate * model_flops / peak,
        hfu=rate * hardware_flops / peak,
        hours=hours,
        device_hours=hours * devices,
        cost=hours * devices * problem.blueprint.cluster.price_per_device_hour,
        candidates=found.legal,
        alternatives=alternatives(problem, found, step),
    )


def flops_per_token(problem: Problem, recompute: int) -> tuple[float, float]:
    """Model and hardware FLOPs of one token, forward and backward; causal attention, active parameters."""
    shard = Shard(sequences=1.0, context=float(problem.space.context))
    known: dict[tuple[Operator, str], tuple[float, float]] = {}
    model, again = 0.0, 0.0
    for row, repeats in zip(problem.work.rows, problem.work.totals.tolist(), strict=True):
        policy = RECOMPUTE[recompute] if row.recomputable else "none"
        for _, operator in row.operators():
            if (operator, policy) not in known:
                work = flops(operator.kernels(shard))
                repeated = flops(operator.recomputed(shard, policy)).forward
                known[operator, policy] = work.forward + work.backward, repeated
            own, repeated = known[operator, policy]
            model += repeats * own
            again += repeats * repeated
    return model / problem.space.context, (model + again) / problem.space.context


def time_items(chosen: Chosen) -> tuple[TimeItem, ...]:
    """Seconds of the step by what they are spent on, the longest first."""
    notes = {
        "pipeline bubble and transfers": "fill, drain, and waiting for slower pipeline ranks",
        "waiting for the host to issue work": f"{chosen.problem.machine.efficiency.host_seconds * 1e6:.0f} us"
        " to issue one operation",
        "recomputation": f"policy: {RECOMPUTE[int(chosen.candidate.recompute[0])]}; loss head's logits",
        "expert products": f"busiest expert-parallel rank at "
        f"{float(chosen.shared.cells.imbalance[0]):.2f} of the mean load",
        COPIES: "both ways at once, in slices; what the update hides is not in it",
        "activations to and from the host": "where a layer's input takes longer than the layer",
        "optimizer": "norm, clipping, update, Muon's exchanges, sums of routers' counters",
        "expert all-to-all": "dispatch under the shared experts, where there are any",
        "tensor-parallel collectives": "not hidden under compute",
        "context-parallel collectives": "not hidden under compute",
    }
    items = [
        TimeItem(name=name, seconds=float(seconds[0]), note=notes.get(name, ""))
        for name, seconds in time_breakdown(chosen.group).items()
        if seconds[0] > 1e-12
    ]
    return tuple(sorted(items, key=lambda item: (-item.seconds, item.name)))


def stage_memory(chosen: Chosen) -> StageMemory:
    """Budgets of all pipeline ranks, the worst one's on top."""
    ranks = tuple(memory_budget(chosen, rank) for rank in range(chosen.group.pp))
    worst = max(ranks, key=lambda budget: budget.peak_bytes)
    return StageMemory(
        peak_bytes=worst.peak_bytes,
        items=worst.items,
        verdict=worst.verdict,
        ranks=ranks,
        host=_host_memory(chosen) if chosen.group.host else None,
    )


def _host_memory(chosen: Chosen) -> HostMemory:
    """The fullest node, its items in the proportions of the pipeline rank that keeps most there."""
    group = chosen.group
    fullest = int(np.sum(list(group.host.values()), axis=0)[0].argmax())
    rank = {name: float(values[0, fullest]) for name, values in group.host.items()}
    scale = float(group.node_bytes[0]) / sum(rank.values())
    sizes = {name: round(size * scale) for name, size in rank.items() if size}
    items = [
        MemoryItem.model_validate(
            {"name": name, "category": CATEGORY[name], "bytes": size, "note": NOTES.get(name, "")}
        )
        for name, size in sizes.items()
    ]
    return HostMemory(
        items=tuple(sorted(items, key=lambda item: (-item.bytes, item.name))),
        node_bytes=sum(sizes.values()),
        capacity_bytes=host_capacity(chosen.problem),
    )


def memory_budget(chosen: Chosen, rank: int) -> MemoryBudget:
    """The budget of one pipeline rank; its items are whole bytes and add up to the peak."""
    group, capacity = chosen.group, chosen.problem.capacity_bytes
    moment = list(group.memory.moments)[int(group.peaks.moment[0, rank])]
    layer = group.memory.layer
    named = moment if layer is None or moment != IN_LAYER else f"{moment} {layer[0, rank]}"
    inside = {name: round(float(v[0, rank])) for name, v in group.memory.moments[moment].items()}
    outside = {name: round(float(v[0])) for name, v in group.memory.outside.items()}
    allocated = sum(inside.values())
    reserved = round(float(group.peaks.reserved[0, rank]))
    pools = max(
        min(round(float(group.memory.reserved[0, rank])), reserved - ALLOCATOR_SLACK_BYTES), allocated
    )
    slack = max(reserved - pools, 0)
    held = {OTHER_MOMENTS: pools - allocated, "allocator rounding and fragmentation": slack}
    sizes = {**inside, **held, **outside}
    items = [
        MemoryItem.model_validate(
            {"name": name, "category": CATEGORY[name], "bytes": size, "note": NOTES.get(name, "")}
        )
        for name, size in sizes.items()
        if size
    ]
    outside_bytes = sum(outside.values())
    reserved = pools + slack
    peak = reserved + outside_bytes
    upper = max(round(float(group.peaks.upper[0, rank])), peak)
    name = "every rank" if group.pp == 1 else f"pipeline rank {rank}"
    return MemoryBudget(
        rank=name,
        pipeline_rank=rank,
        items=tuple(sorted(items, key=lambda item: (-item.bytes, item.name))),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        outside_bytes=outside_bytes,
        peak_bytes=peak,
        upper_bytes=upper,
        capacity_bytes=capacity,
        moment=named,
        verdict=verdict(peak, upper, capacity),
    )


def alternatives(problem: Problem, found: Found, chosen_seconds: float) -> tuple[Alternative, ...]:
    """Runners-up of different kinds: the next best layouts, and faster ones that do not fit.

    The search compared them with the chosen one by closed forms: so many times its simulated seconds.
    """
    best = found.best
    assert best is not None
    step, peak, upper = found.step_seconds, found.peak_bytes, found.upper_bytes
    entries: list[Alternative] = []
    others = found.order[found.order != best]
    for index in others[: RUNNERS_UP - 1]:
        entries.append(
            _alternative(problem, found, chosen_seconds, int(index), _why_worse(found, int(index)))
        )
    capacity = problem.capacity_bytes
    faster = np.flatnonzero((step < step[best]) & (upper > capacity))
    for index in faster[np.argsort(step[faster], kind="stable")][: RUNNERS_UP + 1 - len(entries)]:
        needs = peak[index] if peak[index] > capacity else upper[index]
        kind = "needs" if peak[index] > capacity else "may need"
        reason = f"{kind} {needs / 2**30:,.1f} GiB of {capacity / 2**30:,.1f}"
        entries.append(_alternative(problem, found, chosen_seconds, int(index), reason))
    return tuple(entries)


def _alternative(
    problem: Problem, found: Found, chosen_seconds: float, index: int, reason: str
) -> Alternative:
    slower = float(found.step_seconds[index] / found.step_seconds[found.best])
    return Alternative(
        layout=found.candidates.layout(index, offload=problem.space.offload),
        step_seconds=chosen_seconds * slower,
        peak_bytes=round(float(found.peak_bytes[index])),
        reason=reason,
    )


def _why_worse(found: Found, index: int) -> str:
    ratio = float(found.step_seconds[index] / found.step_seconds[found.best])
    if ratio > 1.0005:
        return f"{100 * (ratio - 1):.1f} % slower"
    if ratio < 0.9995:
        return f"{100 * (1 - ratio):.1f} % faster a step, dearer to go to or on from"
    more = found.peak_bytes[index] > found.peak_bytes[found.best]
    return "as fast, needs more memory" if more else "as fast to 0.05 %, needs less memory"
