"""The evaluation suite over a generated model with every block, pictures included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shipway.runtime.data.batch import Batch
from shipway.runtime.evaluation.scorer import logits_scorer, model_scorer
from shipway.runtime.evaluation.suite import make_suite, run_suite
from shipway.schemas.training import Data
from tests.runtime.data.files import write_text
from tests.runtime.data.streams import numbered_texts
from tests.templates.generated import build, variant

WEIGHTS = {"text": 1.0, "drawn": 1.0}


@pytest.fixture
def data(tmp_path: Path) -> Data:
    write_text(tmp_path / "text", numbered_texts(60))
    sources = {
        "text": {"kind": "files", "path": "text"},
        "drawn": {"kind": "rendered_text", "pictures": 40, "largest_tokens": 32},
    }
    return Data.from_data({"sources": sources, "held_out": 0.5})


def test_a_generated_model_is_scored_as_by_its_logits(data: Data, tmp_path: Path) -> None:
    config = variant("vision", vocabulary=260)
    model = build(config)
    suite = make_suite(data, WEIGHTS, 192, 4, 0, tmp_path, model=config, per_depth=1, per_task=2)

    def logits(batch: Batch) -> torch.Tensor:
        return model.eval()(batch.tokens, None, batch.cu_seqlens, **batch.image_arguments)

    expected = run_suite(logits_scorer(logits), suite).means()
    got = run_suite(model_scorer(model), suite).means()
    assert got == pytest.approx(expected, rel=1e-4)
    assert {"held_out/source/text", "held_out/source/drawn", "captions/drawn", "needle/depth/1"} <= set(got)


def test_the_held_out_loss_is_the_models_own_loss(data: Data, tmp_path: Path) -> None:
    config = variant("vision", vocabulary=260)
    model = build(config).eval()
    suite = make_suite(data, WEIGHTS, 192, 4, 0, tmp_path, model=config, per_depth=1, per_task=2)
    total = count = 0.0
    with torch.no_grad():
        for batch in suite.held_out:
            total += float(model(batch.tokens, batch.labels, batch.cu_seqlens, **batch.image_arguments))
            count += batch.valid_tokens
    assert run_suite(model_scorer(model), suite).means()["held_out/all"] == pytest.approx(
        total / count, rel=1e-4
    )
