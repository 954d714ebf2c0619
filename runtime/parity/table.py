"""Rows of the parity table: layouts, and the models and batches that they are shown on.

A row is a layout, a model of `MODELS` and a batch of `parity_batches`; each is compared with one process on
the same model and batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shipway.runtime.parity.batches import MERGE, MICRO_SEQUENCES, PATCH, SEQUENCES, BatchKind
from shipway.schemas.layout import Layout

ModelName = Literal["hybrid", "auxiliary", "deep", "seeing"]

SMALL = (
    "tiny",
    *("model.layers=4", "model.width=64", "model.feed_forward.dense_inner_width=128"),
    *(f"model.attention.delta.{name}=16" for name in ("key_width", "value_width", "decay_rank")),
    "model.attention.delta.chunk=32",
    *("model.attention.latent.query_rank=32", "model.attention.latent.rope_width=8"),
    *(f"model.attention.latent.{name}=16" for name in ("kv_rank", "nope_width", "value_width")),
    *(f"model.feed_forward.experts.{name}=32" for name in ("inner_width", "latent_width")),
)

WIDE = (
    *("model.width=256", "model.feed_forward.dense_inner_width=256", "model.attention.delta.chunk=64"),
    *(f"model.attention.delta.{name}=128" for name in ("key_width", "value_width", "decay_rank")),
    *("model.attention.latent.query_rank=128", "model.attention.latent.rope_width=64"),
    *(f"model.attention.latent.{name}=128" for name in ("kv_rank", "nope_width", "value_width")),
)
"""Widths of real models where the GPU's kernels are made and tuned for them. Experts stay narrow: wider ones
only make bf16 itself err more, against which layouts are judged."""

MODELS: Mapping[ModelName, tuple[str, ...]] = {
    "hybrid": (),
    "auxiliary": (
        "model.feed_forward.experts.balancing.kind=auxiliary",
        "~model.feed_forward.experts.balancing.bins",
        "+model.feed_forward.experts.balancing.weight=0.1",
        "model.attention.latent.position.kind=rotary",
    ),
    "deep": ("model.layers=8",),
    "seeing": (
        "+model.vision={layers: 2, width: 32, heads: 2, head_width: 16, inner_width: 64, position_grid: 6,"
        f" projector_width: 64, patch: {PATCH}, merge: {MERGE}}}",
    ),
}
"""Every text block of the reference design; balancing by a loss, rotary positions; enough layers for two
chunks on each of four pipeline ranks; a vision tower."""


def overrides(model: ModelName, device: str) -> tuple[str, ...]:
    """What `shipway build` and `shipway plan` are given for a model of the table on a device."""
    return (*SMALL, *(WIDE if device == "cuda" else ()), *MODELS[model])


IN_FP8 = ("cluster=h200_1", "training.precision.compute=fp8", "training.precision.fp8_smallest=16")
"""What it is given besides to name the linears that multiply in fp8, however narrow: a device that has it."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    layout: Layout
    model: ModelName = "hybrid"
    batch: BatchKind = "packed"


def layout(name_of_axes: str = "", **options: Any) -> Layout:
    """A layout by the short names of its axes, "tp 2, ep 2", its micro-batches filling the step."""
    fields = {
        "pp": "pipeline_parallel",
        "rep": "data_parallel_replicate",
        "fsdp": "data_parallel_shard",
        "cp": "context_parallel",
        "tp": "tensor_parallel",
        "ep": "expert_parallel",
    }
    pairs = [axis.split() for axis in name_of_axes.split(", ") if axis]
    values = {fields[axis]: int(n) for axis, n in pairs} | options
    rows = values.get("data_parallel_replicate", 1) * values.get("data_parallel_shard", 1)
    values.setdefault("micro_batch", min(MICRO_SEQUENCES, SEQUENCES // rows))
    return Layout.model_validate(values | {"micro_batches": SEQUENCES // rows // values["micro_batch"]})


def _rows(layouts: Mapping[str, Layout], **options: Any) -> dict[str, Row]:
    return {name: Row(wanted, **options) for name, wanted in layouts.items()}


ALONE = Layout(micro_batch=SEQUENCES)
"""The reference: one process, no accumulation."""

PIPELINE: Mapping[str, Any] = {
    "schedule": "1f1b",
    "zero": 1,
    "micro_batch": 1,
    "stage_layers": ((0, 2), (2, 4)),
}
INTERLEAVED: Mapping[str, Any] = PIPELINE | {
    "schedule": "interleaved_1f1b",
    "virtual_stages": 2,
    "stage_layers": ((0, 1), (1, 2), (2, 3), (3, 4)),
}
V_SHAPED: Mapping[str, Mapping[str, Any]] = {
    name: INTERLEAVED | {"schedule": name} for name in ("zbv", "dualpipev")
}
DEEP_V_SHAPED: Mapping[str, Mapping[str, Any]] = {
    name: options | {"stage_layers": tuple((n, n + 1) for n in range(8))}
    for name, options in V_SHAPED.items()
}

SHARDED: Mapping[str, Layout] = {
    "accumulation": layout(micro_batch=1),
    "fsdp 2": layout("fsdp 2"),
    "fsdp 2, accumulation": layout("fsdp 2", micro_batch=2),
    "fsdp 4": layout("fsdp 4"),
    "fsdp 2, zero 2": layout("fsdp 2", zero=2),
    "fsdp 2, zero 1": layout("fsdp 2", zero=1),
    "rep 2, fsdp 2, zero 1": layout("rep 2, fsdp 2", zero=1),
    "rep 2": layout("rep 2"),
    "rep 2, fsdp 2": layout("rep 2, fsdp 2"),
    "full recomputation": layout(recompute="full"),
    "fsdp 2, full recomputation": layout("fsdp 2", recompute="full"),
    "fsdp 2, selective recomputation": layout("fsdp 2", recompute="selective"),
}
EXPERTS: Mapping[str, Layout] = {
    "fsdp 2, ep 2": layout("fsdp 2, ep 2"),
    "fsdp 4, ep 2": layout("fsdp 4, ep 2"),
    "fsdp 4, ep 4": layout("fsdp 4, ep 4"),
    "fsdp 2, ep 2, zero 1, full recomputation": layout("fsdp 2, ep 2", zero=1, recompute="full"),
    "rep 2, fsdp 2, ep 2": layout("rep 2, fsdp 2, ep 2"),
    "fsdp 4, ep 2, full recomputation": layout("fsdp 4, ep 2", recompute="full"),
    "fsdp 4, ep 4, selective recomputation": layout("fsdp 4, ep 4", recompute="selective"),
}
TENSOR: Mapping[str, Layout] = {
    "tp 2": layout("tp 2"),
    "tp 4": layout("tp 4"),
    "tp 2, full recomputation": layout("tp 2", recompute="full"),
    "tp 2, selective recomputation": layout("tp 2", recompute="selective"),
    "fsdp 2, tp 2": layout("fsdp 2, tp 2"),
    "rep 2, tp 2": layout("rep 2, tp 2"),
    "tp 2, ep 2": layout("tp 2, ep 2"),
    "fsdp 2, tp 2, ep 2": layout("fsdp 2, tp 2, ep 2"),
    "fsdp 2, tp 2, ep 4, selective recomputation": layout("fsdp 2, tp 2, ep 4", recompute="selective"),
    "fsdp 4, tp 2, ep 4": layout("fsdp 4, tp 2, ep 4"),
}
CONTEXT: Mapping[str, Layout] = {
    "cp 2": layout("cp 2"),
    "cp 4": layout("cp 4"),
    "cp 2, heads": layout("cp 2", delta_context="heads"),
    "cp 4, heads": layout("cp 4", delta_context="heads"),
    "cp 2, tp 2, heads": layout("cp 2, tp 2", delta_context="heads"),
    "cp 2, full recomputation": layout("cp 2", recompute="full"),
    "cp 2, selective recomputation": layout("cp 2", recompute="selective"),
    "fsdp 2, cp 2": layout("fsdp 2, cp 2"),
    "rep 2, cp 2": layout("rep 2, cp 2"),
    "cp 2, ep 2": layout("cp 2, ep 2"),
    "cp 2, tp 2": layout("cp 2, tp 2"),
    "fsdp 2, cp 2, tp 2, ep 4": layout("fsdp 2, cp 2, tp 2, ep 4"),
}
PIPELINED: Mapping[str, Layout] = {
    "pp 2": layout("pp 2", **PIPELINE),
    "pp 2, interleaved": layout("pp 2", **INTERLEAVED),
    "pp 2, full recomputation": layout("pp 2", **PIPELINE, recompute="full"),
    "pp 2, fsdp 2, ep 2": layout("pp 2, fsdp 2, ep 2", **PIPELINE),
    "pp 2, tp 2": layout("pp 2, tp 2", **PIPELINE),
    "pp 2, cp 2": layout("pp 2, cp 2", **PIPELINE),
    "pp 2, fsdp 2, tp 2, ep 4": layout("pp 2, fsdp 2, tp 2, ep 4", **PIPELINE),
    "pp 2, zbv": layout("pp 2", **V_SHAPED["zbv"]),
    "pp 2, dualpipev": layout("pp 2", **V_SHAPED["dualpipev"]),
    "pp 2, fsdp 2, ep 2, zbv": layout("pp 2, fsdp 2, ep 2", **V_SHAPED["zbv"]),
    "pp 2, fsdp 2, ep 2, dualpipev": layout("pp 2, fsdp 2, ep 2", **V_SHAPED["dualpipev"]),
    "pp 2, tp 2, zbv": layout("pp 2, tp 2", **V_SHAPED["zbv"]),
    "pp 2, cp 2, zbv": layout("pp 2, cp 2", **V_SHAPED["zbv"]),
    "pp 2, full recomputation, zbv": layout("pp 2", **V_SHAPED["zbv"], recompute="full"),
    "pp 2, selective recomputation, dualpipev": layout(
        "pp 2", **V_SHAPED["dualpipev"], recompute="selective"
    ),
}

OFFLOADED: Mapping[str, Layout] = {
    "optimizer offloaded": layout(offload="optimizer"),
    "fsdp 2, optimizer offloaded": layout("fsdp 2", offload="optimizer"),
    "rep 2, fsdp 2, ep 2, optimizer offloaded": layout("rep 2, fsdp 2, ep 2", offload="optimizer"),
    "pp 2, tp 2, optimizer offloaded": layout("pp 2, tp 2", **PIPELINE, offload="optimizer"),
    "activations offloaded": layout(offload="activations", recompute="full", micro_batch=2),
    "fsdp 2, ep 2, activations offloaded": layout("fsdp 2, ep 2", offload="activations", recompute="full"),
    "pp 2, fsdp 2, activations offloaded": layout(
        "pp 2, fsdp 2", **PIPELINE, offload="activations", recompute="full"
    ),
    "cp 2, tp 2, both offloaded": layout("cp 2, tp 2", offload="both", recompute="full"),
    "pp 2, zbv, both offloaded": layout("pp 2", **V_SHAPED["zbv"], offload="both", recompute="full"),
}

SEEING: Mapping[str, Layout] = {
    "fsdp 4, pictures": layout("fsdp 4"),
    "fsdp 2, ep 2, full recomputation, pictures": layout("fsdp 2, ep 2", recompute="full"),
    "tp 2, pictures": layout("tp 2"),
    "tp 2, ep 2, micro-batches without, pictures": layout("tp 2, ep 2", micro_batch=1),
    "cp 2, pictures": layout("cp 2"),
    "cp 4, pictures": layout("cp 4", micro_batch=1),
    "cp 2, tp 2, pictures": layout("cp 2, tp 2"),
    "fsdp 2, cp 2, pictures": layout("fsdp 2, cp 2"),
    "pp 2, pictures": layout("pp 2", **PIPELINE),
    "pp 2, interleaved, pictures": layout("pp 2", **INTERLEAVED),
    "pp 2, zbv, pictures": layout("pp 2", **V_SHAPED["zbv"]),
    "pp 2, fsdp 2, dualpipev, pictures": layout("pp 2, fsdp 2", **V_SHAPED["dualpipev"]),
    "pp 2, tp 2, pictures": layout("pp 2, tp 2", **PIPELINE),
    "pp 2, cp 2, zbv, pictures": layout("pp 2, cp 2", **V_SHAPED["zbv"]),
    "pp 2, cp 2, tp 2, pictures": layout("pp 2, cp 2, tp 2", **PIPELINE),
}

ROWS: Mapping[str, Row] = {
    **_rows(SHARDED | EXPERTS | TENSOR | CONTEXT | PIPELINED | OFFLOADED),
    **_rows(
        {"cp 4, fragments": layout("cp 4"), "cp 2, tp 2, fragments": layout("cp 2, tp 2")}, batch="fragments"
    ),
    **_rows(
        {
            "fsdp 4, uneven": layout("fsdp 4"),
            "fsdp 2, cp 2, uneven": layout("fsdp 2, cp 2"),
            "pp 2, uneven": layout("pp 2", **PIPELINE),
        },
        batch="uneven",
    ),
    **_rows(
        {
            "fsdp 4, ep 4, empty experts": layout("fsdp 4, ep 4"),
            "fsdp 2, tp 2, ep 4, empty experts": layout("fsdp 2, tp 2, ep 4"),
        },
        batch="empty experts",
    ),
    **_rows(
        {
            "fsdp 2, auxiliary loss": layout("fsdp 2"),
            "tp 2, auxiliary loss": layout("tp 2"),
            "cp 2, auxiliary loss": layout("cp 2"),
            "cp 2, tp 2, auxiliary loss": layout("cp 2, tp 2"),
            "pp 2, auxiliary loss": layout("pp 2", **PIPELINE),
            "pp 2, zbv, auxiliary loss": layout("pp 2", **V_SHAPED["zbv"]),
        },
        model="auxiliary",
    ),
    **_rows(
        {
            "pp 4, zbv": layout("pp 4", **DEEP_V_SHAPED["zbv"]),
            "pp 4, dualpipev": layout("pp 4", **DEEP_V_SHAPED["dualpipev"]),
            "pp 4, fsdp 2, zbv": layout("pp 4, fsdp 2", **DEEP_V_SHAPED["zbv"]),
        },
        model="deep",
    ),
    **_rows(SEEING, model="seeing", batch="pictures"),
}
"""Every axis alone, the combinations that plans are made of, and the batches that go wrong elsewhere."""
