"""What was measured on GPUs, kept in bench/results, holds the catalogue and the plan to account."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.contenders.cases import CONTENDERS
from shipway.compiler.compose import compose
from shipway.compiler.lower import lower
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


def test_kept_activations_are_what_the_fused_kernels_keep_on_an_h200() -> None:
    measured = result("h200-kept-bytes.json")
    model = blueprint_of(measured).model
    lowered, kinds = lower(model), model.attention_kinds()
    shard = Shard(sequences=measured["sequences"], context=measured["context"], element_bytes=2)
    for name, kept_bytes in measured["kept_bytes"].items():
        layer, block = name.split(".")
        if block == "attention" and kinds[int(layer)] == "delta":
            continue  # keeps less since than it did: the readings of whole steps hold it
        stated = sum(
            tensor.bytes
            for placed in lowered.layers[int(layer)].operators
            if placed.path == block or placed.path.startswith(f"{block}.")
            for tensor in placed.operator.saved(shard, "none")
        )
        assert stated == pytest.approx(kept_bytes, rel=1e-3), name


def test_a_plan_is_near_what_an_h200_held_and_took_for_real_text() -> None:
    measured = result("h200-documents.json")
    plan = make_plan(blueprint_of(measured))
    assert isinstance(plan, Plan)
    (stage,), reading = plan.stages, measured["reading"]
    (budget,), (rank,) = stage.memory.ranks, reading["ranks"]
    assert budget.allocated_bytes == pytest.approx(
        rank["allocated_bytes"], rel=0.015
    )  # it kept one tensor more in every delta layer
    assert budget.reserved_bytes == pytest.approx(rank["reserved_bytes"], rel=0.03)
    assert budget.upper_bytes > rank["reserved_bytes"] + rank["outside_bytes"]


def test_plans_are_near_the_steps_and_the_memory_that_an_h200_trained_with() -> None:
    for row in result("h200-throughput.json")["rows"]:
        if row["kind"] != "shipway":
            continue
        contender = next(each for each in CONTENDERS if each.name == row["name"])
        layout = f"training.stages.0.layout.zero={row['settings']['zero']}"
        case = str(ROOT / f"bench/blueprints/{row['case']}.yaml")
        blueprint, _ = validate(compose(case, (*contender.overrides, layout), None))
        assert blueprint is not None
        plan = make_plan(blueprint)
        assert isinstance(plan, Plan)
        (stage,) = plan.stages
        assert stage.step_seconds == pytest.approx(row["step_seconds"], rel=0.1), row["name"]
        assert stage.memory.ranks[0].allocated_bytes == pytest.approx(row["allocated_bytes"], rel=0.01), row[
            "name"
        ]


def test_memory_of_drawn_models_is_what_an_h200_held() -> None:
    """Readings of programs that have not changed since: delta attention keeps less than in the older ones."""
    older = [case for seed in (1, 4) for case in result(f"h200-verify-seed{seed}.json")["cases"]]
    cases = [case for case in older if "delta" not in case["model"]["attention"]["mix"]["pattern"]]
    for draws in ("11", "12-near", "21", "22-near"):
        cases += result(f"h200-verify-seed{draws}.json")["cases"]
    errors = []
    for case in cases:
        plan = make_plan(drawn(case))
        assert isinstance(plan, Plan)
        (budget,), (rank,) = plan.stages[0].memory.ranks, case["reading"]["ranks"]
        errors.append(budget.allocated_bytes / rank["allocated_bytes"] - 1)
        assert budget.upper_bytes > rank["reserved_bytes"] + rank["outside_bytes"], case["name"]
    assert median(map(abs, errors)) < 0.002
    assert min(errors) > -0.013
    assert max(errors) < 0.006


def test_blind_draws_are_planned_as_they_were_before_they_were_measured() -> None:
    for name in ("h200-verify-seed21.json", "h200-verify-seed22-near.json"):
        read = result(name)
        totals = [{total["name"]: total for total in case["totals"]} for case in read["cases"]]
        errors = [abs(each["allocated"]["error"]) for each in totals]
        assert median(errors) < 0.01
        assert max(errors) < 0.03
        assert read["false_fits"] == 0
        for case, each in zip(read["cases"], totals, strict=True):
            plan = make_plan(drawn(case))
            assert isinstance(plan, Plan)
            allocated = plan.stages[0].memory.ranks[0].allocated_bytes
            assert allocated == pytest.approx(each["allocated"]["planned"], rel=0.005), case["name"]


def drawn(case: dict[str, Any]) -> Blueprint:
    """The blueprint of a case of a campaign, with the ZeRO level that was measured."""
    stages = [dict(stage) for stage in case["stages"]]
    stages[0]["layout"] = {**stages[0]["layout"], "zero": case["reading"]["layout"]["zero"]}
    cluster, diagnostics = validate(compose("small_h200", (), None))
    assert cluster is not None, diagnostics
    return Blueprint.from_data(
        {
            "name": case["name"],
            "model": case["model"],
            "training": {
                "stages": stages,
                "optimizer": {"kind": case["optimizer"]},
                "checkpoints": {"every_steps": 1000},
                "evaluation": {"every_steps": 1000},
            },
            "cluster": cluster.cluster.model_dump(mode="json"),
        }
    )
