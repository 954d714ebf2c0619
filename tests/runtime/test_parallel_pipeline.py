"""Pipelines train what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shipway.runtime.exit_codes import ExitCode, Fatal
from shipway.runtime.metrics import read_metrics
from shipway.runtime.parallel.pipeline import chunks_of
from shipway.schemas.layout import Layout
from tests.runtime.gradient_cases import Gradients, all_gradients, assert_same
from tests.runtime.ranks import run_ranks
from tests.runtime.small_plan import small_plan, write_build
from tests.runtime.test_resume import OPTIONS, figures, start
from tests.runtime.training_cases import SEQUENCES
from tests.templates.generated import load, variant

ALONE = Layout(micro_batch=SEQUENCES)
PP2 = Layout(
    pipeline_parallel=2,
    data_parallel_shard=2,
    micro_batch=1,
    micro_batches=4,
    zero=1,
    schedule="1f1b",
    stage_layers=((0, 3), (3, 5)),
)
UNEVEN = ((0, 1), (1, 3), (3, 4), (4, 5))
PP4 = Layout(
    pipeline_parallel=4, micro_batch=1, micro_batches=8, zero=1, schedule="1f1b", stage_layers=UNEVEN
)
INTERLEAVED = PP2.model_copy(
    update={"virtual_stages": 2, "schedule": "interleaved_1f1b", "stage_layers": UNEVEN}
)
ZBV, DUALPIPEV = (INTERLEAVED.model_copy(update={"schedule": name}) for name in ("zbv", "dualpipev"))
CASES: dict[str, tuple[Layout, dict[str, Any], str]] = {
    "pp 2 x fsdp 2": (PP2, {}, "hybrid"),
    "pp 4": (PP4, {}, "hybrid"),
    "full residuals": (PP4, {}, "older delta"),
    "plain residuals, rotary": (PP4, {"multi_token_prediction": None}, "rotary latent"),
    "full recomputation": (PP2.model_copy(update={"recompute": "full"}), {}, "hybrid"),
    "interleaved": (INTERLEAVED, {}, "hybrid"),
    "zbv": (ZBV, {}, "hybrid"),
    "zbv, full recomputation": (ZBV.model_copy(update={"recompute": "full"}), {}, "hybrid"),
    "dualpipev, experts over ranks": (
        DUALPIPEV.model_copy(update={"expert_parallel": 2}),
        {},
        "older delta",
    ),
    "with replicas": (
        PP2.model_copy(update={"data_parallel_shard": 1, "data_parallel_replicate": 2}),
        {},
        "hybrid",
    ),
    "with context parallel": (
        PP2.model_copy(update={"data_parallel_shard": 1, "context_parallel": 2, "micro_batches": 8}),
        {},
        "hybrid",
    ),
    "with experts over ranks": (PP2.model_copy(update={"expert_parallel": 2}), {}, "hybrid"),
}


UNTIED: dict[str, Any] = {"tied_embeddings": False}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[list[Gradients], Gradients]]:
    """Found by each of four ranks, and by one process, of every case."""
    expected = run_ranks(all_gradients, 1, [(ALONE, *rest) for _, *rest in CASES.values()])[0]
    per_rank = run_ranks(all_gradients, 4, list(CASES.values()))
    found = [list(ranks) for ranks in zip(*per_rank, strict=True)]
    return dict(zip(CASES, zip(found, expected, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_pipeline_trains_what_one_process_trains(
    outcomes: dict[str, tuple[list[Gradients], Gradients]], name: str
) -> None:
    found, expected = outcomes[name]
    for rank in found:
        assert_same(rank, expected)
    assert {n for rank in found for n in rank.gradients} == set(expected.gradients)


def test_auxiliary_losses_of_all_stages_count() -> None:
    (expected,) = run_ranks(all_gradients, 1, [(Layout(micro_batch=SEQUENCES), UNTIED, "grouped")])[0]
    for (found,) in run_ranks(all_gradients, 4, [(PP4, UNTIED, "grouped")]):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("changes", "model", "reason"),
    [
        ({}, "grouped", "tied embeddings"),
        ({}, "three kinds", "multi-token prediction"),
        ({"micro_batches": 1}, "hybrid", "at least as many micro-batches"),
        ({"schedule": "zbv"}, "hybrid", "zbv puts two chunks on every pipeline rank"),
        (
            {**DUALPIPEV.model_dump(), "micro_batches": 3},
            "hybrid",
            "under dualpipev needs twice as many micro-batches",
        ),
        ({"stage_layers": ((0, 2), (2, 4))}, "hybrid", "do not cut the layers"),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused(changes: dict[str, Any], model: str, reason: str) -> None:
    layout = PP2.model_copy(update=changes)
    with torch.device("meta"), pytest.raises(Fatal, match=reason):
        chunks_of(load(variant(model)).Model(), layout, 0)


def test_programme_crosses_from_a_pipeline_to_context_parallel_and_evaluates_alike(tmp_path: Path) -> None:
    stages = {"short": 3, "long": 2}
    spread = [
        ZBV.model_copy(update={"data_parallel_shard": 1}),
        Layout(context_parallel=2, micro_batch=2, micro_batches=2),
    ]
    plain = [Layout(data_parallel_shard=2, micro_batch=2)] * 2
    for name, layouts in (("spread", spread), ("plain", plain)):
        build = write_build(small_plan(stages, layouts, sequences=4, **OPTIONS), tmp_path / name)
        assert run_ranks(start, 2, build, tmp_path / f"run {name}") == [ExitCode.DONE] * 2
    found, expected = (figures(tmp_path / f"run {name}") for name in ("spread", "plain"))
    for mine, other in zip(found, expected, strict=True):
        assert mine[:2] + mine[4:] == other[:2] + other[4:]  # stage, step, token stream
        assert mine[2:4] == pytest.approx(other[2:4], rel=1e-3)
    measures = [evaluations(tmp_path / f"run {name}") for name in ("spread", "plain")]
    assert len(measures[0]) == 2
    assert all(measures[0])
    for mine, other in zip(*measures, strict=True):
        assert mine == pytest.approx(other, rel=1e-3)


def evaluations(run: Path) -> list[dict[str, float]]:
    """Held-out losses of each evaluation."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line.get("event") == "evaluation"]
    return [{k: v for k, v in line["measures"].items() if k.startswith("held_out")} for line in lines]
