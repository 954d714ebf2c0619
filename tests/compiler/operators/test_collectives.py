"""The ledger is what the runtime sends: kind, bytes, group and count of every collective of a step.

Both sides are whole: a rank's step is run under a fake process group, and nothing that it sends may be
missing from the ledger, nor anything be in the ledger that it does not send.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipway.compiler.assemble import choose
from shipway.compiler.delta_context import with_delta_context
from shipway.compiler.layouts import from_layout
from shipway.compiler.ledger import ledger
from shipway.compiler.lower import lower
from shipway.compiler.problem import problem
from shipway.compiler.workload import workload
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.layout import Layout
from tests.compiler.operators.models import Data, same_examples
from tests.compiler.operators.traced_step import Call, traced_step
from tests.templates.generated import variant

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about its own names

CONTEXT = 128
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {"data_parallel_shard": 4, "micro_batches": 2},
    "FSDP that does not divide": {"data_parallel_shard": 3, "zero": 2, "micro_batches": 2},
    "ZeRO 1": {"data_parallel_shard": 2, "zero": 1, "micro_batches": 3},
    "replicas": {"data_parallel_replicate": 2, "data_parallel_shard": 2, "micro_batch": 2},
    "tensor and sequence parallel": {"tensor_parallel": 2},
    "context parallel": {"context_parallel": 2, "micro_batch": 2},
    "expert parallel": {"data_parallel_shard": 4, "expert_parallel": 2},
    "expert parallel over tp": {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 4},
    "pipeline": {"pipeline_parallel": 2, "schedule": "1f1b", "micro_batches": 3},
    "interleaved pipeline": {
        "pipeline_parallel": 2,
        "virtual_stages": 2,
        "schedule": "interleaved_1f1b",
        "micro_batches": 2,
    },
    "V-shaped pipeline": {
        "pipeline_parallel": 2,
        "virtual_stages": 2,
        "schedule": "zbv",
        "data_parallel_shard": 2,
        "micro_batches": 3,
    },
    "all axes": {
        "pipeline_parallel": 2,
        "schedule": "1f1b",
        "data_parallel_replicate": 2,
        "data_parallel_shard": 2,
        "context_parallel": 2,
        "tensor_parallel": 2,
        "expert_parallel": 4,
        "micro_batches": 2,
    },
}


@st.composite
def splittable(draw: st.DrawFn, layout: Layout) -> Data:
    """A model whose every dimension can be shared by the ranks above."""
    is_piped, is_sliced = layout.pipeline_parallel > 1, layout.context_parallel > 1
    kinds, layers = st.sampled_from(["delta", "latent", "grouped"]), draw(st.integers(4, 5))
    rotary = st.sampled_from([{"kind": "none"}, {"kind": "rotary"}])
    key_width = draw(st.sampled_from([16, 24]))
    shared = draw(st.integers(0, 2))
    latent_width = draw(st.sampled_from([None, 16, 32]))
    balancing: Data = {"kind": draw(st.sampled_from(["quantile", "bias", "auxiliary", "none"]))}
    if balancing["kind"] == "quantile":
        balancing |= {"estimator": draw(st.sampled_from(["histogram", "exact"])), "bins": 20}
    residuals = [{"kind": "plain"}, {"kind": "full"}, {"kind": "block", "block_layers": 2}]
    return {
        "vocabulary": draw(st.sampled_from([64, 96])),
        "width": draw(st.sampled_from([32, 48])),
        "layers": layers,
        "attention": {
            "mix": draw(st.lists(kinds, min_size=layers, max_size=layers)),
            "delta": {
                "heads": 4,
                "value_heads": draw(st.sampled_from([4, 8])),
                "key_width": key_width,
                "value_width": 16,
                "decay_rank": 8,
                "output_gate": draw(st.sampled_from(["full", "low_rank"])),
                "chunk": 32,
            },
            "latent": {
                "heads": 4,
                "query_rank": draw(st.sampled_from([None, 20])),
                "kv_rank": draw(st.sampled_from([12, 24])),
                "nope_width": 16,
                "rope_width": 8,
                "value_width": 16,
                "position": draw(rotary),
            },
            "grouped": {
                "heads": 4,
                "kv_heads": draw(st.sampled_from([2, 4])),
                "head_width": 8,
                "position": draw(rotary),
            },
        },
        "feed_forward": {
            "mix": draw(st.lists(st.sampled_from(["dense", "experts"]), min_size=layers, max_size=layers)),
            "dense_inner_width": draw(st.sampled_from([40, 64])),
            "experts": {
                "routed": 8,
                "active": draw(st.integers(1, 3)),
                "inner_width": draw(st.sampled_from([24, 32])),
                "latent_width": latent_width,
                "shared": shared,
                "shared_gate": bool(shared) and draw(st.booleans()),
                "balancing": balancing,
            },
        },
        "residual": draw(st.sampled_from(residuals)),
        "tied_embeddings": not is_piped and draw(st.booleans()),
        "multi_token_prediction": None
        if is_piped or is_sliced
        else draw(st.sampled_from([None, {"depth": 1}])),
    }


@st.composite
def trainings(draw: st.DrawFn) -> Data:
    """Optimizer and number formats."""
    per_head = draw(st.booleans())
    optimizer = draw(st.sampled_from([{"kind": "adamw"}, {"kind": "muon", "per_head": per_head}]))
    compute = draw(st.sampled_from(["fp32", "bf16"]))
    precision = {
        "compute": compute,
        "master": draw(st.sampled_from(["fp32", "bf16"])),
        "gradients": draw(st.sampled_from(["fp32", "bf16"])) if compute == "bf16" else "fp32",
    }
    return {"optimizer": optimizer, "precision": precision}


def blueprint_of(model: Data, training: Data, layout: Layout) -> Blueprint:
    """A blueprint of one stage on CPUs, whose step has the layout's sequences."""
    batch = layout.data_parallel * layout.micro_batch * layout.micro_batches * CONTEXT
    stage = {"name": "only", "context": CONTEXT, "tokens": batch, "global_batch": batch}
    stage["learning_rate"] = {"kind": "constant", "peak": 0.01}
    device = {
        "name": "cpu",
        "kind": "cpu",
        "memory": "8GB",
        "memory_bandwidth": "20GB/s",
        "peak": {"bf16": "50GFLOP/s", "fp32": "50GFLOP/s"},
        "link_bandwidth": "5GB/s",
        "host_bandwidth": "5GB/s",
        "source": "made up for tests",
    }
    cluster = {"name": "cpu", "nodes": 1, "devices_per_node": layout.world_size, "device": device}
    return Blueprint.from_data(
        {"name": "traced", "model": model, "training": {"stages": [stage], **training}, "cluster": cluster}
    )


def stated_step(blueprint: Blueprint, layout: Layout) -> tuple[Counter[Call], Layout, int]:
    """The ledger's calls, the layout with its cut, and the first rank of the busiest pipeline stage."""
    own = problem(blueprint, blueprint.training.stages[0], workload(lower(blueprint.model)))
    chosen = choose(own, from_layout(layout))
    calls: Counter[Call] = Counter()
    for line in ledger(chosen):
        calls[Call(line.collective, line.group_size, line.stride, line.bytes)] += line.count
    cut = tuple(pairwise(chosen.group.chunked.bounds[0].tolist()))
    rank = chosen.busiest * layout.world_size // layout.pipeline_parallel
    return calls, with_delta_context(own, layout.model_copy(update={"stage_layers": cut})), rank


def differences(stated: Counter[Call], traced: Counter[Call]) -> list[str]:
    """Calls that only one side has."""
    calls = sorted({*stated, *traced})
    return [
        f"{call}: {stated[call]} stated, {traced[call]} traced"
        for call in calls
        if stated[call] != traced[call]
    ]


@pytest.mark.parametrize("name", LAYOUTS)
@same_examples(3)
@given(st.data())
def test_every_collective_of_a_step(name: str, data: st.DataObject) -> None:
    degrees = LAYOUTS[name]
    is_piped = "pipeline_parallel" in degrees
    recompute = data.draw(st.sampled_from(["none", "selective", "full"]))
    layout = Layout(**{"zero": 1 if is_piped else 3, "recompute": recompute, **degrees})
    blueprint = blueprint_of(data.draw(splittable(layout)), data.draw(trainings()), layout)
    stated, layout, rank = stated_step(blueprint, layout)
    assert not differences(stated, traced_step(blueprint, layout, rank))


SEEING: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor_parallel": 2, "micro_batches": 2},
    "context parallel": {"context_parallel": 2, "data_parallel_shard": 2},
    "both, in a pipeline": {
        "pipeline_parallel": 2,
        "schedule": "1f1b",
        "zero": 1,
        "micro_batches": 2,
        "context_parallel": 2,
        "tensor_parallel": 2,
    },
}


@pytest.mark.parametrize("name", SEEING)
def test_every_collective_of_a_step_on_pictures(name: str) -> None:
    layout = Layout(**SEEING[name])
    drawn = {"kind": "rendered_text", "largest_tokens": CONTEXT}
    model = variant("vision", vocabulary=260, attention__delta__heads=4).model_dump(mode="json")
    blueprint = blueprint_of(model, {"data": {"sources": {"drawn": drawn}}}, layout)
    stated, layout, rank = stated_step(blueprint, layout)
    assert not differences(stated, traced_step(blueprint, layout, rank))
