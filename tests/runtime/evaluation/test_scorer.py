"""Scores in chunks equal scores from all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shipway.runtime.evaluation import scorer
from shipway.runtime.evaluation.scorer import logits_scorer, model_scorer
from tests.runtime.data.streams import loader, numbered_texts


class Small(nn.Module):
    """Reads out as generated models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(259, 8)
        self.mixer = nn.Dropout(0.5)
        self.head = nn.Linear(8, 259)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        return self.read_out(self.mixer(self.embed(tokens)).cumsum(1), labels)

    def read_out(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(x)


def test_chunks_of_a_row_give_the_scores_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small().train()
    (batch,) = loader({"a": numbered_texts(50)}, context=32, micro_batch=8).next_step()
    expected = logits_scorer(lambda b: model.eval()(b.tokens))(batch)
    model.train()
    monkeypatch.setattr(scorer, "_CHUNK_LOGITS", 259 * 8 * 5)
    got = model_scorer(model)(batch)
    torch.testing.assert_close(got.loss, expected.loss)
    assert torch.equal(got.correct, expected.correct)
    assert not got.loss.requires_grad
    assert model.training
    assert "read_out" not in vars(model)


def test_a_model_that_fails_is_left_as_it_was() -> None:
    model = Small()
    (batch,) = loader({"a": numbered_texts(50)}, context=32, micro_batch=8).next_step()
    with pytest.raises(AttributeError):
        model_scorer(model)(None)  # type: ignore[arg-type]
    assert "read_out" not in vars(model)
    assert model_scorer(model)(batch).loss.shape == (8, 32)
