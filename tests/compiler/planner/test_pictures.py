"""Stages that read pictures are planned with the vision tower's work, as if pictures filled every row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from shipway.compiler.lower import lower
from shipway.compiler.operators.base import Shard, flops
from shipway.compiler.operators.vision import VisionTower, share_of
from shipway.compiler.pictures import with_pictures
from shipway.compiler.pipeline import make_plan
from shipway.compiler.workload import FIRST, workload
from shipway.schemas.plan import Plan
from shipway.schemas.training import Data
from tests.blueprints.test_blueprints import valid
from tests.templates.generated import variant

TEXT = ("+training.data.sources.stdlib={kind: python_stdlib}", "~training.data.sources.drawn")


@cache
def planned(*overrides: str) -> Plan:
    plan = make_plan(valid("captions", *overrides))
    assert isinstance(plan, Plan)
    return plan


def test_full_rows_bring_a_patch_for_each_square_of_a_token_and_images_of_the_largest_size() -> None:
    model = variant("vision", vocabulary=260)
    drawn = {"kind": "rendered_text", "largest_tokens": 16}
    data = Data.from_data({"sources": {"drawn": drawn, "t": {"kind": "python_stdlib"}}})
    work = workload(lower(model))
    assert with_pictures(work, model.vision, data, {"t": 1.0}, 64) is work
    assert with_pictures(work, None, data, None, 64) is work
    seeing = with_pictures(work, model.vision, data, None, 64)
    assert seeing.rows[FIRST + 1 :] == work.rows[FIRST + 1 :]

    rows, full = Shard(3, 64), Shard(3, 64, patches=3 * 64 * 4, patches_per_image=16 * 4)
    for (_, seen), (_, plain) in zip(
        seeing.rows[FIRST].operators(), work.rows[FIRST].operators(), strict=True
    ):
        assert flops(seen.kernels(rows)) == flops(plain.kernels(full))
        assert seen.saved(rows, "none") == plain.saved(full, "none")
        assert seen.scratch_bytes(rows) == plain.scratch_bytes(full)
        assert seen.parameters() == plain.parameters()


def test_a_plan_counts_the_towers_work_and_says_that_it_is_a_bound() -> None:
    seeing, reading = planned(), planned(*TEXT)
    stage, text = seeing.stages[0], reading.stages[0]
    assert stage.model_flops_per_token > 1.5 * text.model_flops_per_token
    kept = {
        name: next(item.bytes for item in plan.stages[0].memory.items if item.name == "kept activations")
        for name, plan in (("pictures", seeing), ("text", reading))
    }
    assert kept["pictures"] > kept["text"]
    assert any("stage read: memory and time are upper bounds" in warning for warning in seeing.warnings)
    assert any("without images: stages are text" in warning for warning in reading.warnings)


@pytest.mark.parametrize("axis", ["tensor_parallel", "context_parallel"])
def test_ranks_of_a_row_share_its_pictures_and_gather_what_they_make_of_them(axis: str) -> None:
    stage = planned(f"training.layout.{axis}=2", "training.stages.0.context=128").stages[0]
    sent = {line.name: line.collective for line in stage.communication if line.name.startswith("image")}
    assert sent == {"image embeddings": "all_gather", "image embeddings' gradient": "reduce_scatter"}
    assert not any(line.name.startswith("image") for line in planned().stages[0].communication)


def test_no_rank_is_planned_with_more_than_all_or_less_than_its_part() -> None:
    tower = VisionTower(variant("vision").vision, patches_per_token=4, patches_per_image=64)
    alone, shared = Shard(1, 64), Shard(1, 64, tensor=2, context_parallel=2)
    assert share_of(tower, alone) == 64 * 4
    assert (
        share_of(tower, shared) == 64 * 4 / 4 + 64 * 3 / 4
    )  # an equal part, and what others lack of a picture
    assert share_of(replace(tower, patches_per_image=256), shared) == 64 * 4
