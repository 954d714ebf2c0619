"""What was measured on GPUs, kept in bench/results, holds the catalogue and the plan to account."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shipway.compiler.compose import compose
from shipway.compiler.lower import Part, lower
from shipway.compiler.operators.base import Shard
from shipway.compiler.pipeline import make_plan
from shipway.compiler.validate import validate
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.plan import Plan

ROOT = Path(__file__).parents[2]


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def blueprint_of(measured: dict[str, Any]) -> Blueprint:
    blueprint, diagnostics = validate(compose(str(ROOT / measured["blueprint"]), (), None))
    assert blueprint is not None, diagnostics
    return blueprint


def router_copy_bytes(part: Part, width: int, shard: Shard) -> float:
    """What was kept of a layer when this was measured and is no more: the router's input in fp32."""
    routed = any(placed.path.endswith("router") for placed in part.operators)
    return 4 * width * shard.tokens if routed else 0


def test_kept_activations_are_what_the_fused_kernels_keep_on_an_h200() -> None:
    measured = result("h200-kept-bytes.json")
    model = blueprint_of(measured).model
    lowered = lower(model)
    shard = Shard(sequences=measured["sequences"], context=measured["context"], element_bytes=2)
    for name, kept_bytes in measured["kept_bytes"].items():
        layer, block = name.split(".")
        part = lowered.layers[int(layer)]
        stated = sum(
            tensor.bytes
            for placed in part.operators
            if placed.path == block or placed.path.startswith(f"{block}.")
            for tensor in placed.operator.saved(shard, "none")
        )
        gone = router_copy_bytes(part, model.width, shard) if block == "feed_forward" else 0
        assert stated + gone == pytest.approx(kept_bytes, rel=1e-3), name


def test_planned_memory_of_a_training_step_is_near_what_an_h200_held() -> None:
    measured = result("h200-small-8k.json")
    blueprint = blueprint_of(measured)
    plan = make_plan(blueprint)
    assert isinstance(plan, Plan)
    (rank,) = plan.stages[0].memory.ranks
    layout, model = plan.stages[0].layout, blueprint.model
    shard = Shard(sequences=layout.micro_batch, context=plan.stages[0].context_tokens)
    gone = sum(router_copy_bytes(part, model.width, shard) for part in lower(model).layers)
    assert layout.recompute == "none"
    assert rank.allocated_bytes + gone == pytest.approx(measured["measured"]["allocated_bytes"], rel=0.03)
    assert rank.reserved_bytes + gone == pytest.approx(measured["measured"]["reserved_bytes"], rel=0.03)
    assert rank.upper_bytes > measured["measured"]["reserved_bytes"]
