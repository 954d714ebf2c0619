"""Pictures under every axis: layouts train and score what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from shipway.runtime.evaluation.scorer import model_scorer
from shipway.runtime.mesh import MeshPool, build_mesh
from shipway.runtime.parallel.context import sliced_scorer
from shipway.runtime.parallel.pictures import share_out
from shipway.runtime.parallelize import build_parallel_model
from shipway.runtime.parity.batches import SEQUENCES, micro_batches
from shipway.runtime.parity.judge import Models, judge
from shipway.runtime.parity.table import ROWS
from shipway.schemas.layout import Layout
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import FP32, SHALLOW
from tests.templates.generated import load, variant

TRAINED = ("cp 2, tp 2, pictures", "pp 2, cp 2, zbv, pictures")
ALONE = Layout(micro_batch=SEQUENCES)
SCORED = {
    "tp 2": ALONE.model_copy(update={"tensor_parallel": 2}),
    "cp 2": ALONE.model_copy(update={"context_parallel": 2}),
    "pp 2": Layout(
        pipeline_parallel=2,
        micro_batch=SEQUENCES // 2,
        micro_batches=2,
        zero=1,
        schedule="1f1b",
        stage_layers=((0, 1), (1, 3)),
    ),
}


def test_pictures_train_what_one_process_trains(tmp_path: Path) -> None:
    verdicts = judge({name: ROWS[name] for name in TRAINED}, Models(tmp_path))
    assert not {v.name: v.reason or v.differences for v in verdicts if not v.proven}
    assert all("vision" in v.differences for v in verdicts)


def scores(layouts: list[Layout]) -> list[torch.Tensor]:
    """Loss of every token of the first rows, as evaluation asks for it."""
    pool, found = MeshPool(torch.device("cpu")), []
    module = load(variant("vision", vocabulary=64, **SHALLOW))
    for layout in layouts:
        mesh = build_mesh(layout, pool.device, pool)
        model = build_parallel_model(module, mesh, FP32, 3)
        score: Any = model.pipeline.score if model.pipeline else model_scorer(model.parts[0])
        if mesh.size("cp") > 1:
            score = sliced_scorer(score, mesh.group("cp"))
        found.append(score(micro_batches(0, mesh, 64, "pictures")[0]).loss)
    return found


def test_pictures_score_as_in_one_process() -> None:
    (expected,) = run_ranks(scores, 1, [ALONE])[0]
    for rank in run_ranks(scores, 2, list(SCORED.values())):
        for name, found in zip(SCORED, rank, strict=True):
            torch.testing.assert_close(found, expected[: len(found)], rtol=1e-4, atol=1e-5, msg=name)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), ranks=st.integers(1, 6))
def test_every_picture_is_encoded_once_and_no_rank_has_more_than_planned(
    sizes: list[int], ranks: int
) -> None:
    shares = share_out(sizes, ranks)
    assert sorted(picture for share in shares for picture in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    most = max(sum(sizes[i] for i in share) for share in shares)
    # what a plan counts with (compiler/operators/vision.py)
    assert most <= sum(sizes) / ranks + max(sizes) * (1 - 1 / ranks) + 1e-9


def test_a_rank_without_a_picture_runs_the_tower_all_the_same() -> None:
    assert share_out([8], 3) == [[0], [], []]
