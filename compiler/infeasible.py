"""Why there is no plan: pins that cannot be, and stages that do not fit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shipway.compiler.describe import describe
from shipway.compiler.frozen import frozen
from shipway.compiler.meshes import legal_meshes
from shipway.compiler.offload_rules import host_is_what_lacks, host_too_small, offload_conflicts
from shipway.compiler.problem import Problem
from shipway.compiler.schedule_rules import micro_batches_refused, schedule_conflicts
from shipway.compiler.search import Found
from shipway.compiler.space import CONTEXT_MULTIPLE, Space, context_slices, divisors, nearest_first
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.layout import LayoutConstraints

GIB = 2**30


@frozen
class _Pin:
    """A pinned degree and the rules it must meet."""

    field: str
    name: str
    value: int


def illegal(problem: Problem, index: int) -> list[Diagnostic]:
    """Every reason why a stage's pinned layout cannot be, in one list; empty when it can."""
    space = problem.space
    found = [
        *_alone(space, index),
        *_too_many_devices(space, index),
        *_not_runnable(space, index),
        *offload_conflicts(problem, _path(index, "")),
    ]
    if found:
        return found
    return list(_together(space, index))


def _path(index: int, field: str) -> str:
    return f"training.stages.{index}.layout.{field}"


def _pinned(pins: LayoutConstraints) -> dict[str, int]:
    names = (
        "pipeline_parallel",
        "virtual_stages",
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
        "expert_parallel",
        "micro_batch",
    )
    values = {name: getattr(pins, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _alone(space: Space, index: int) -> Iterator[Diagnostic]:
    """Each pinned degree against what it must divide."""
    for field, value in _pinned(space.constraints).items():
        legal, reasons = _rules(space, field)
        broken = [reason for test, reason in reasons if not test(value)]
        if not broken:
            continue
        yield Diagnostic(
            code="BP402",
            summary=f"{field} {value} is not possible: {broken[0]}",
            field=_path(index, field),
            because=tuple(broken),
            legal=nearest_first([v for v in legal if all(test(v) for test, _ in reasons)], value),
            help="Leave it out to let the search choose.",
        )


def _rules(space: Space, field: str):  # type: ignore[no-untyped-def]
    """Candidate values of a field, and tests with the reason that a failing value is told."""
    anything = list(range(1, space.devices + 1))

    def dividing(number: int, what: str):  # type: ignore[no-untyped-def]
        return (lambda v: number % v == 0, f"it must divide {what} ({number})")

    devices = divisors(space.devices)
    predictions = (
        lambda v: v == 1 or not space.predictions,
        "the runtime runs multi-token prediction on whole rows and whole models only",
    )
    match field:
        case "tensor_parallel":
            rules = [dividing(x.value, f"the {x.what}") for x in space.limits if x.axis == "tp"]
            rules.append(
                dividing(space.context // space.granule, "the sequence, which sequence parallel cuts")
            )
            return devices, rules
        case "context_parallel":
            halves = (
                lambda v: v == 1 or space.context % (2 * v) == 0,
                f"twice it must divide the context ({space.context}); nearest legal contexts are multiples",
            )
            slices = (
                lambda v: v == 1 or context_slices(space.context, v),
                f"a slice must be a whole number of {CONTEXT_MULTIPLE}-token chunks",
            )
            heads = (
                lambda v: v == 1 or space.constraints.delta_context != "heads" or space.delta_heads % v == 0,
                f"delta_context heads deals out the {space.delta_heads} delta-attention heads over them",
            )
            return devices, [halves, slices, heads, predictions]
        case "expert_parallel":
            if not space.experts:
                return [1], [(lambda v: v == 1, "the model has no routed experts")]
            return divisors(space.experts), [dividing(space.experts, "the routed experts")]
        case "pipeline_parallel":
            layers = (lambda v: v <= space.layers, f"every rank needs one of the {space.layers} layers")
            tied = (
                lambda v: v == 1 or not space.tied,
                "the head shares the embedding's table, which would stand on two pipeline ranks",
            )
            return anything[: space.layers], [layers, tied, predictions]
        case "virtual_stages":
            most = space.capability.virtual_stages
            return range(1, most + 1), [
                (lambda v: v <= most, f"the runtime takes at most {most} chunks on one pipeline rank")
            ]
        case "data_parallel_replicate" | "data_parallel_shard":
            return divisors(space.sequences), [
                dividing(space.sequences, "the sequences of one optimizer step")
            ]
        case "micro_batch":
            return divisors(space.sequences), [
                dividing(space.sequences, "the sequences of one optimizer step")
            ]
    return anything, []


def _too_many_devices(space: Space, index: int) -> Iterator[Diagnostic]:
    held = _pinned(space.constraints)
    axes = [a for a in held if a not in ("virtual_stages", "expert_parallel", "micro_batch")]
    product = int(np.prod([held[a] for a in axes], dtype=object)) if axes else 1
    if product > space.devices:
        yield Diagnostic(
            code="BP403",
            summary=f"the pinned layout takes {product} devices, the cluster has {space.devices}",
            field=_path(index, axes[0]),
            because=tuple(f"{a} {held[a]}" for a in axes),
            help="Lower one of these degrees, or use a larger cluster.",
        )


def _not_runnable(space: Space, index: int) -> Iterator[Diagnostic]:
    pins, can = space.constraints, space.capability
    schedules = ("none", *can.schedules)
    if pins.schedule is not None and pins.schedule not in schedules:
        yield Diagnostic(
            code="BP404",
            summary=f"the runtime does not run the schedule {pins.schedule}",
            field=_path(index, "schedule"),
            because=(can.schedules_because,) if can.schedules_because else (),
            legal=schedules,
            help="Leave it out to let the search choose.",
        )
    yield from schedule_conflicts(pins, _path(index, ""))
    if pins.zero and (pins.pipeline_parallel or 1) > 1 and pins.zero not in can.zero_with_pipeline:
        legal = tuple(str(level) for level in can.zero_with_pipeline)
        yield Diagnostic(
            code="BP404",
            summary=f"zero {pins.zero} is not what a pipeline does",
            field=_path(index, "zero"),
            because=(
                "torch's pipeline stages keep parameters gathered and gradients whole over all"
                " micro-batches of a step, and reduce once",
                f"pipeline_parallel {pins.pipeline_parallel}",
            ),
            legal=legal,
            help=f"Pin zero: {legal[0]}, or leave it out.",
        )
    if pins.recompute is not None and pins.recompute not in can.recompute:
        yield Diagnostic(
            code="BP404",
            summary=f"the runtime does not run recompute: {pins.recompute}",
            field=_path(index, "recompute"),
            legal=can.recompute,
        )


def _together(space: Space, index: int) -> Iterator[Diagnostic]:
    """Pins that are legal one by one and leave nothing together."""
    from shipway.compiler.layouts import count_layouts

    held = _pinned(space.constraints)
    if not (held or space.constraints.schedule) or count_layouts(space):
        return
    because = [f"{name} {value}" for name, value in held.items()]
    because += _derived(space, held)
    releases = list(_releases(space, held))
    yield Diagnostic(
        code="BP402",
        summary=_headline(space, held),
        field=_path(index, next(iter(held), "schedule")),
        because=tuple(because),
        legal=tuple(release for release in releases),
        help="Change one of the pinned degrees as listed, or leave it out."
        if releases
        else "Leave more of the layout out, or change the global batch.",
    )


def _headline(space: Space, held: dict[str, int]) -> str:
    pp = held.get("pipeline_parallel", 1)
    data = held.get("data_parallel_shard", 1) * held.get("data_parallel_replicate", 1)
    micro_batch = held.get("micro_batch", 1)
    count = space.sequences // max(data * micro_batch, 1)
    if pp > 1 and count < pp:
        return (
            f"a pipeline of {pp} needs at least {pp} micro-batches, there are {count}: "
            "raise the global batch, or lower data parallel or the micro-batch"
        )
    if space.sequences % (data * micro_batch):
        return (
            f"data parallel {data} x micro-batch {micro_batch} does not divide"
            f" the {space.sequences} sequences of a step"
        )
    refused = micro_batches_refused(space, held, count)
    if refused:
        return refused
    experts = held.get("expert_parallel")
    region = data * held.get("context_parallel", 1) * held.get("tensor_parallel", 1)
    if experts and held.get("data_parallel_shard") and region % experts:
        return (
            f"expert_parallel {experts} does not divide its region of {region} ranks"
            " (data_parallel_shard x context_parallel x tensor_parallel)"
        )
    tensor, ranks = held.get("tensor_parallel", 1), held.get("data_parallel_shard", 0)
    ranks *= held.get("context_parallel", 1)
    if ranks and (block := space.split.obstacle(tensor, ranks)):
        return (
            f"{ranks} FSDP ranks (data_parallel_shard x context_parallel) cannot share evenly the {block}"
            f" block that tensor_parallel {tensor} leaves"
        )
    if pp * held.get("virtual_stages", 1) > space.layers:
        return f"{pp} x {held['virtual_stages']} model chunks need as many layers, there are {space.layers}"
    return "the pinned degrees leave no legal layout together"


def _derived(space: Space, held: dict[str, int]) -> list[str]:
    """Group sizes that follow from the pins, and the defaults among them."""
    product = int(
        np.prod([held.get(a, 1) for a in ("pipeline_parallel", "context_parallel", "tensor_parallel")])
    )
    left = space.devices // max(product, 1)
    lines = [
        f"{space.devices} devices / (pipeline x context x tensor = {product})"
        f" leave data parallel up to {left}",
        f"{space.sequences} sequences in one optimizer step",
    ]
    if space.experts:
        region = left * held.get("context_parallel", 1) * held.get("tensor_parallel", 1)
        lines.append(f"expert parallel folds a part of dp_shard x cp x tp, here up to {region} ranks")
    return lines


def _releases(space: Space, held: dict[str, int]) -> Iterator[str]:
    """For each pin alone, values that would be legal with all others kept."""
    from dataclasses import replace

    for field, value in held.items():
        free = replace(space, constraints=space.constraints.model_copy(update={field: None}))
        options = _values(free, field)
        if options:
            yield f"{field}: {', '.join(nearest_first(options, value)[:4])}"


def _values(space: Space, field: str) -> list[int]:
    from shipway.compiler.layouts import enumerate_layouts

    columns = {
        "pipeline_parallel": 0,
        "data_parallel_replicate": 1,
        "data_parallel_shard": 2,
        "context_parallel": 3,
        "tensor_parallel": 4,
        "expert_parallel": 5,
    }
    if len(legal_meshes(space)) > 20_000:
        table = legal_meshes(space)
        return sorted({int(v) for v in table[:, columns[field]]}) if field in columns else []
    found = enumerate_layouts(space)
    name = {
        "pipeline_parallel": "pp",
        "data_parallel_replicate": "replicate",
        "data_parallel_shard": "shard",
        "context_parallel": "cp",
        "tensor_parallel": "tp",
        "expert_parallel": "ep",
        "micro_batch": "micro_batch",
        "virtual_stages": "virtual",
    }[field]
    return sorted({int(v) for v in getattr(found, name)})


def nothing_fits(
    problem: Problem, found: Found | None, index: int, least_offloaded_bytes: float | None = None
) -> list[Diagnostic]:
    """The nearest misses of a stage, by how much they miss, and what would make them fit.

    `least_offloaded_bytes`: what a device would need with offload, where that was tried.
    """
    stage, capacity = problem.stage, problem.capacity_bytes
    if found is None or not len(found.candidates):
        return [
            Diagnostic(
                code="PL001",
                summary=f"stage {stage.name}: no legal layout on {problem.space.devices} devices",
                field=f"training.stages.{index}",
                because=(
                    f"{problem.space.sequences} sequences of {problem.space.context} tokens in one step",
                    f"{problem.space.devices} devices, {problem.space.devices_per_node} a node",
                ),
                help="Raise the global batch, or use another number of nodes.",
            )
        ]
    if host_is_what_lacks(problem, found):
        return [host_too_small(problem, found, index)]
    peak = found.peak_bytes
    nearest = np.argsort(peak, kind="stable")[:3]
    least = float(peak[nearest[0]])
    offload = problem.space.offload
    because = [
        f"{describe(found.candidates.layout(int(i), offload=offload))}: needs {peak[i] / GIB:,.1f} GiB,"
        f" has {capacity / GIB:,.1f}, {(peak[i] - capacity) / GIB:,.1f} too many"
        for i in nearest
    ]
    if least_offloaded_bytes is not None:
        because.append(f"with training.layout.offload still {least_offloaded_bytes / GIB:,.1f} GiB")
    return [
        Diagnostic(
            code="PL001",
            summary=f"stage {stage.name} does not fit: the least demanding of {found.legal} legal layouts"
            f" needs {least / GIB:,.1f} GiB on a device that has {capacity / GIB:,.1f}",
            field=f"training.stages.{index}",
            because=tuple(because),
            help=_way_out(problem, found, least),
        )
    ]


def _way_out(problem: Problem, found: Found, least: float) -> str:
    capacity, devices = problem.capacity_bytes, problem.space.devices
    ways = []
    for name, memory in (
        ("80 GB", 79.1),
        ("96 GB", 94.5),
        ("141 GB", 139.8),
        ("192 GB", 178.0),
        ("288 GB", 268.0),
    ):
        if memory * GIB > max(least * 1.06, capacity):
            ways.append(f"devices of {name}")
            break
    factor = 2 ** max(1, int(np.ceil(np.log2(least / capacity))))
    ways.append(f"about {factor * devices} devices, if states are what is too large")
    pins = problem.space.constraints
    held = [name for name, value in pins.model_dump(exclude_none=True).items() if value]
    if held:
        ways.append(f"leaving out pinned {', '.join(held)}")
    if problem.blueprint.training.precision.optimizer == "fp32":
        ways.append("training.precision.optimizer: bf16")
    return "What would make it fit: " + "; ".join(ways) + "."
