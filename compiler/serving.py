"""Capacity of serving a model: the smallest groups of devices that hold it, and what they take and give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shipway.compiler.communication import Network
from shipway.compiler.cut import cut
from shipway.compiler.efficiency import default_calibration
from shipway.compiler.emit.constants import PAGE_TOKENS
from shipway.compiler.fabric import fabric, path
from shipway.compiler.frozen import frozen
from shipway.compiler.lower import LoweredModel, Part, lower
from shipway.compiler.operators.base import DecodeState, Gemm, Number, Operator
from shipway.compiler.operators.delta_attention import DeltaAttention
from shipway.compiler.operators.grouped_attention import GroupedAttention
from shipway.compiler.parameters import count
from shipway.compiler.serving_time import Server, decode_seconds, prefill_seconds
from shipway.compiler.serving_weights import Spread, part_bytes, serving_weights
from shipway.compiler.space import limit_allows
from shipway.compiler.timing import machine
from shipway.compiler.workload import Workload, workload
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.calibration import Calibration
from shipway.schemas.cluster import Cluster
from shipway.schemas.serving import (
    RequestState,
    Serving,
    ServingFormat,
    ServingLayout,
    ServingPoint,
    WeightFormat,
)

Floats = npt.NDArray[np.float64]

CONTEXTS = (8_192, 65_536, 262_144, 1_048_576)
USABLE = 0.9
"""Share of a device's memory to plan with; servers commonly keep a tenth free."""
PROMPT_CHUNK = 8_192
"""Tokens of a prompt that pass the model together."""
RANKED_AT = 1
"""Context, of CONTEXTS, whose throughput ranks layouts."""
SHOWN = 2
"""Layouts kept of one number of devices."""
MEBIBYTE = 2**20

ASSUMPTIONS = (
    f"{USABLE:.0%} of a device's memory is planned with; prompts pass {PROMPT_CHUNK:,} tokens at a time",
    "a step is one device graph: no host time; loads of experts are even; shared prefixes are not counted",
    "tensor parallel divides delta states and key-value heads and copies latents",
    "fp8 computes at the device's fp8 peak where it has one; 4-bit experts are expanded to bf16",
)


def serving(blueprint: Blueprint, calibration: Calibration | None = None) -> Serving:
    """Capacity of a validated blueprint's model on its cluster."""
    lowered = lower(blueprint.model)
    figures = calibration or default_calibration(blueprint.cluster.device)
    parameters = count(blueprint.model)
    forms: tuple[WeightFormat, ...] = ("bf16", "fp8", "mxfp4") if has_experts(lowered) else ("bf16", "fp8")
    return Serving(
        name=blueprint.name,
        device=blueprint.cluster.device.name,
        devices=blueprint.cluster.devices,
        calibration=figures.name,
        total_parameters=parameters.total,
        active_parameters=parameters.active,
        trained_context_tokens=max(stage.context for stage in blueprint.training.stages),
        state=request_state(lowered),
        formats=tuple(_format(blueprint.cluster, figures, lowered, form) for form in forms),
        assumptions=ASSUMPTIONS,
    )


def part_state(part: Part, tensor: int = 1) -> DecodeState:
    """State of one request in a part, on one device of `tensor` that share its matrices."""
    token = constant = 0
    for placed in part.operators:
        state = placed.operator.decode_state()
        shared = tensor if isinstance(placed.operator, (GroupedAttention, DeltaAttention)) else 1
        token += state.bytes_per_token // shared
        constant += state.constant_bytes // shared
    return DecodeState(token, constant)


def request_state(lowered: LoweredModel) -> RequestState:
    """State of one request over all layers: a cache only where there is attention over tokens."""
    states = [part_state(layer) for layer in lowered.layers]
    per_token = sum(state.bytes_per_token for state in states)
    return RequestState(
        cache_layers=sum(state.bytes_per_token > 0 for state in states),
        cache_bytes_per_token=per_token,
        constant_layers=sum(state.constant_bytes > 0 for state in states),
        constant_bytes=sum(state.constant_bytes for state in states),
        page_tokens=PAGE_TOKENS,
        page_bytes=PAGE_TOKENS * per_token,
    )


def request_bytes(state: DecodeState, context: int) -> int:
    """One request at `context` tokens, its cache in whole pages."""
    pages = -(-context // PAGE_TOKENS)
    return pages * PAGE_TOKENS * state.bytes_per_token + state.constant_bytes


@frozen(eq=False)
class Sharded:
    """A model spread over the devices of each stage, however many stages there are."""

    lowered: LoweredModel
    work: Workload
    server: Server
    cluster: Cluster

    @cached_property
    def kinds(self) -> tuple[tuple[Part, int], ...]:
        """Kinds of layers and how many there are."""
        return self.lowered.layer_kinds()

    @cached_property
    def operators(self) -> dict[Operator, int]:
        """Distinct operators of the layers and how many there are; equal ones take equal time."""
        counts: dict[Operator, int] = {}
        for part, number in self.kinds:
            for placed in part.operators:
                counts[placed.operator] = counts.get(placed.operator, 0) + number
        return counts

    @cached_property
    def layer_bytes(self) -> tuple[float, ...]:
        """Weights of each layer on one device; the first has the embedding's and the vision's, the last
        the head's."""
        form, spread, lowered = self.server.form, self.server.spread, self.lowered
        kinds = {part: part_bytes(part, form, spread) for part, _ in self.kinds}
        sizes = [kinds[layer] for layer in lowered.layers]
        embedding = part_bytes(lowered.embedding, form, spread)
        sizes[0] += embedding
        if lowered.vision is not None:
            sizes[0] += part_bytes(lowered.vision, form, spread, vision=True)
        sizes[-1] += part_bytes(lowered.final, form, spread) + part_bytes(lowered.head, form, spread)
        return tuple(sizes)

    @cached_property
    def layer_states(self) -> tuple[DecodeState, ...]:
        """State of one request in each layer on one device."""
        kinds = {part: part_state(part, self.server.spread.tensor) for part, _ in self.kinds}
        return tuple(kinds[layer] for layer in self.lowered.layers)

    @cached_property
    def widest_bytes(self) -> int:
        """What the widest operator puts out for one chunk of a prompt, in bf16."""
        shard = self.server.shard(1.0, PROMPT_CHUNK)
        products = (
            sum(float(k.rows * k.columns * k.groups) for k in operator.kernels(shard) if isinstance(k, Gemm))
            for operator in self.operators
        )
        return round(2 * max(products))


@frozen(eq=False)
class Placement:
    """A model on one group of devices."""

    sharded: Sharded
    pipeline: int

    @property
    def server(self) -> Server:
        """Rates and the spread over a stage's devices."""
        return self.sharded.server

    @property
    def cluster(self) -> Cluster:
        """The devices."""
        return self.sharded.cluster

    @property
    def devices(self) -> int:
        """Devices of the group."""
        return self.pipeline * self.server.spread.tensor * self.server.spread.data

    @cached_property
    def layer_bytes(self) -> tuple[float, ...]:
        """Weights of each layer on one device; a tied embedding stands on both ends of a pipeline."""
        held, lowered = self.sharded.layer_bytes, self.sharded.lowered
        if self.pipeline == 1 or not lowered.model.tied_embeddings:
            return held
        return (*held[:-1], held[-1] + part_bytes(lowered.embedding, self.server.form, self.server.spread))

    @cached_property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """First and last (exclusive) layer of each stage, balanced by weights."""
        costs = [max(round(size / MEBIBYTE), 1) for size in self.layer_bytes]
        return tuple(pairwise(cut(costs, self.pipeline)))

    @cached_property
    def stage_bytes(self) -> tuple[float, ...]:
        """Weights of each stage on one device."""
        return tuple(sum(self.layer_bytes[first:last]) for first, last in self.stages)

    @cached_property
    def reserved_bytes(self) -> int:
        """Memory of a device that neither weights nor requests can have."""
        device, e = self.cluster.device, self.server.cores.efficiency
        spread = self.server.spread
        groups = ((spread.tensor, 1), (spread.expert, 1), (self.pipeline, spread.tensor * spread.data))
        communicators = 0
        for size, stride in groups:
            if size > 1:
                far = bool(path(self.server.network.fabric, size, stride).crosses_network)
                communicators += e.communicator_bytes_network if far else e.communicator_bytes_scale_up
        fixed = device.context_bytes + e.library_bytes + communicators + self.sharded.widest_bytes
        return fixed + round((1 - USABLE) * device.memory)

    @cached_property
    def free_bytes(self) -> tuple[float, ...]:
        """What each stage's devices have left for requests; negative when the weights do not fit."""
        left = self.cluster.device.memory - self.reserved_bytes
        return tuple(left - size for size in self.stage_bytes)

    @cached_property
    def stage_states(self) -> tuple[DecodeState, ...]:
        """State of one request on one device of each stage."""
        layers = self.sharded.layer_states
        return tuple(
            DecodeState(
                sum(state.bytes_per_token for state in layers[first:last]),
                sum(state.constant_bytes for state in layers[first:last]),
            )
            for first, last in self.stages
        )

    def requests(self, context: int) -> int:
        """Requests that the group holds at once, all at `context` tokens."""
        held = min(
            int(free // size) if (size := request_bytes(state, context)) else 0
            for free, state in zip(self.free_bytes, self.stage_states, strict=True)
        )
        return max(held, 0) * self.server.spread.data

    def hand_over_seconds(self, tokens: Number) -> Number:
        """Passing the hidden states of `tokens` tokens through all stages."""
        if self.pipeline == 1:
            return 0.0
        spread, work = self.server.spread, self.sharded.work
        size = tokens * work.width * 2 * int(work.states_before.max())
        stride = spread.tensor * spread.data
        once = self.server.network.collective_seconds("send_receive", size, self.pipeline, stride)
        return (self.pipeline - 1) * once

    def prefill(self, context: Floats) -> Floats:
        """Time to the first token: chunks of the prompt follow one another through the stages."""
        operators = self.sharded.operators.items()
        layers = sum(times * prefill_seconds(operator, self.server, context) for operator, times in operators)
        chunks = np.maximum(context // PROMPT_CHUNK, 1)
        filled = layers / self.pipeline * (1 + (self.pipeline - 1) / chunks)
        last = self.hand_over_seconds(np.minimum(context, PROMPT_CHUNK)) + self._ends(np.ones(1))
        seconds: Floats = filled + last
        return seconds

    def decode(self, requests: Floats, context: Floats) -> Floats:
        """Time per token while each data-parallel rank has its part of the requests, in as many batches as
        there are stages."""
        batch = np.maximum(requests / self.server.spread.data / self.pipeline, 1.0)
        operators = self.sharded.operators.items()
        layers = sum(
            times * decode_seconds(operator, self.server, batch, context) for operator, times in operators
        )
        seconds: Floats = layers + self.hand_over_seconds(batch) + self._ends(batch)
        return seconds

    def _ends(self, batch: Floats) -> Number:
        lowered = self.sharded.lowered
        parts = (lowered.embedding, lowered.final, lowered.head)
        operators = [placed.operator for part in parts for placed in part.operators]
        return sum(decode_seconds(operator, self.server, batch, np.ones(1)) for operator in operators)


def placements(
    cluster: Cluster, figures: Calibration, lowered: LoweredModel, form: WeightFormat
) -> Iterator[Placement]:
    """Every group that could hold the model, fewest devices first: degrees of two, any number of stages."""
    rates = machine(cluster.device, figures, "bf16")
    fast = cluster.device.peak.fp8 if form == "fp8" else None
    experts = lowered.model.feed_forward.experts if has_experts(lowered) else None
    work, fab = workload(lowered), fabric(cluster)
    limits, network = work.limits(), Network(fab, figures.efficiency)
    shapes = [
        (tensor * data * pipeline, tensor, data, pipeline)
        for tensor in _powers(min(fab.domain, cluster.devices))
        if limit_allows(limits, "tp", tensor)
        for data in (_powers(cluster.devices // tensor) if experts else [1])
        if not experts or limit_allows(limits, "ep", tensor * data)
        for pipeline in range(1, min(lowered.model.layers, cluster.devices // (tensor * data)) + 1)
        if _whole_nodes(cluster, tensor * data * pipeline)
    ]
    rates_of_products = replace(rates, peak_flops=fast or rates.peak_flops)
    chosen = experts.active / experts.routed if experts else 0.0
    known: dict[Spread, Sharded] = {}
    for _, tensor, data, pipeline in sorted(shapes):
        spread = Spread(tensor, data, tensor * data if experts else 1)
        if spread not in known:
            server = Server(rates_of_products, rates, network, spread, form, chosen)
            known[spread] = Sharded(lowered, work, server, cluster)
        yield Placement(known[spread], pipeline)


def has_experts(lowered: LoweredModel) -> bool:
    """Whether any layer routes."""
    return "experts" in lowered.model.feed_forward_kinds()


def _powers(limit: int) -> list[int]:
    return [1 << shift for shift in range(max(limit, 1).bit_length())]


def _whole_nodes(cluster: Cluster, devices: int) -> bool:
    return devices <= cluster.devices_per_node or devices % cluster.devices_per_node == 0


def _format(
    cluster: Cluster, figures: Calibration, lowered: LoweredModel, form: WeightFormat
) -> ServingFormat:
    weights = serving_weights(lowered, form)
    least = weights.bytes / (USABLE * cluster.device.memory)
    groups = (p for p in placements(cluster, figures, lowered, form) if p.devices >= least)
    held = _smallest(groups, CONTEXTS[0])
    if not held:
        room = cluster.devices * cluster.device.memory
        note = (
            f"{weights.bytes / 2**30:,.0f} GiB of weights and one request find no place on"
            f" {cluster.devices:,} devices of {cluster.device.memory / 2**30:.0f} GiB"
            f" ({room / 2**30:,.0f} GiB in all)"
        )
        return ServingFormat(weights=weights, layouts=(), note=note)
    layouts = _best(held)
    if not any(placement.requests(CONTEXTS[-1]) for placement in held):
        layouts += _best(_smallest(groups, CONTEXTS[-1]))
    return ServingFormat(weights=weights, layouts=tuple(layouts))


def _smallest(groups: Iterator[Placement], context: int) -> list[Placement]:
    """Groups of the smallest size that holds a request at `context`; takes from `groups` in order."""
    held: list[Placement] = []
    for placement in groups:
        if held and placement.devices > held[0].devices:
            break
        if placement.requests(context):
            held.append(placement)
    return held


def _best(held: list[Placement]) -> list[ServingLayout]:
    layouts = [_layout(placement) for placement in held]
    layouts.sort(key=lambda layout: (-layout.points[RANKED_AT].tokens_per_second, layout.pipeline_parallel))
    return layouts[:SHOWN]


def groups_in(cluster: Cluster, devices: int) -> int:
    """Groups of `devices` that a cluster has room for; small ones do not straddle nodes."""
    if devices <= cluster.devices_per_node:
        return cluster.nodes * (cluster.devices_per_node // devices)
    return cluster.devices // devices


def _layout(placement: Placement) -> ServingLayout:
    spread = placement.server.spread
    fullest = max(range(placement.pipeline), key=lambda stage: placement.stage_bytes[stage])
    return ServingLayout(
        tensor_parallel=spread.tensor,
        data_parallel=spread.data,
        expert_parallel=spread.expert,
        pipeline_parallel=placement.pipeline,
        devices=placement.devices,
        groups=groups_in(placement.cluster, placement.devices),
        weight_bytes=round(placement.stage_bytes[fullest]),
        reserved_bytes=placement.reserved_bytes,
        state_bytes=round(placement.free_bytes[fullest]),
        points=tuple(_points(placement)),
    )


def _points(placement: Placement) -> Iterator[ServingPoint]:
    contexts = np.array(CONTEXTS, dtype=np.float64)
    requests = np.array([placement.requests(context) for context in CONTEXTS], dtype=np.float64)
    prefill = placement.prefill(contexts)
    alone = placement.decode(np.ones_like(contexts), contexts)
    full = placement.decode(np.maximum(requests, 1.0), contexts)
    whole = request_state(placement.sharded.lowered)
    state = DecodeState(whole.cache_bytes_per_token, whole.constant_bytes)
    for index, context in enumerate(CONTEXTS):
        yield ServingPoint(
            context_tokens=context,
            request_bytes=request_bytes(state, context),
            requests=int(requests[index]),
            prefill_seconds=float(prefill[index]),
            decode_seconds=float(alone[index]),
            decode_seconds_full=float(full[index]),
            tokens_per_second=float(requests[index] / full[index]),
        )
