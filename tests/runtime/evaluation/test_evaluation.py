"""Each measure tells a model that can from one that cannot."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from shipway.runtime.data.errors import DataError
from shipway.runtime.data.packing import IGNORED
from shipway.runtime.data.sources.streams import open_sources
from shipway.runtime.data.stream import Split
from shipway.runtime.data.tokenizers import ByteLevel
from shipway.runtime.evaluation.held_out import document_positions, held_out_batches, position_buckets
from shipway.runtime.evaluation.items import BATCH_TOKENS, Item, exactness, pack_items
from shipway.runtime.evaluation.needle import DEPTHS, needle_groups, needle_items
from shipway.runtime.evaluation.scorer import logits_scorer
from shipway.runtime.evaluation.suite import Suite, make_suite, run_suite
from shipway.runtime.evaluation.tally import Tally
from shipway.runtime.evaluation.tasks import TASKS, task_items
from shipway.schemas.training import Data
from tests.runtime.data.files import write_text
from tests.runtime.evaluation.scorers import (
    VOCABULARY,
    knows_all,
    knows_all_but_the_last_of_each_answer,
    knows_nothing,
    repeats_itself,
)

WEIGHTS = {"a": 1.0, "b": 1.0}


@pytest.fixture
def data(tmp_path: Path) -> Data:
    generator = np.random.default_rng(0)
    for name in WEIGHTS:
        write_text(tmp_path / name, [f"{name}{i} " * int(generator.integers(1, 200)) for i in range(60)])
    sources = {name: {"kind": "files", "path": name} for name in WEIGHTS}
    return Data.from_data({"sources": sources, "held_out": 0.3})


def suite(data: Data, folder: Path, rank: int = 0, size: int = 1) -> Suite:
    return make_suite(data, WEIGHTS, 512, 9, 0, folder, rank, size, per_depth=1, per_task=4)


def test_a_perfect_model_and_an_ignorant_one(data: Data, tmp_path: Path) -> None:
    means = run_suite(logits_scorer(knows_all), suite(data, tmp_path)).means()
    assert set(means) >= {"held_out/all", "held_out/source/a", "held_out/position/0-127", "needle/depth/0.5"}
    assert {f"tasks/{name}" for name in TASKS} <= set(means)
    for name, mean in means.items():
        assert mean == pytest.approx(0.0 if name.startswith("held_out") else 1.0, abs=1e-6)
    means = run_suite(logits_scorer(knows_nothing), suite(data, tmp_path)).means()
    for name, mean in means.items():
        assert mean == pytest.approx(math.log(VOCABULARY) if name.startswith("held_out") else 0.0)


def test_shares_of_any_number_of_ranks_add_up_to_the_same_means(data: Data, tmp_path: Path) -> None:
    whole = run_suite(logits_scorer(repeats_itself), suite(data, tmp_path)).means()
    shares = [suite(data, tmp_path, rank, 4) for rank in range(4)]
    for measure in ("held_out", "needle", "tasks"):
        assert len({len(getattr(share, measure)) for share in shares}) == 1
    tallies = [run_suite(logits_scorer(repeats_itself), share) for share in shares]
    total = torch.stack([torch.stack([tally.sums, tally.counts]) for tally in tallies]).sum(0)
    together = tallies[0].reduced(lambda both: both.copy_(total)).means()
    assert together == pytest.approx(whole)


def test_held_out_rows_hold_no_document_of_training(data: Data, tmp_path: Path) -> None:
    held_out = {
        (sample.source, sample.document)
        for batch in held_out_batches(data, WEIGHTS, 256, 40, 0, tmp_path)
        for sample in batch.samples
    }
    training = open_sources(data, WEIGHTS, 0, tmp_path, Split(data.held_out))
    for name, stream in training.streams.items():
        trained = {(name, piece.document) for piece in stream.take(100_000)}
        assert trained
        assert not trained & held_out


def test_a_source_that_holds_nothing_out_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_text(tmp_path, ["a single document"])
    data = Data.from_data({"sources": {"one": {"kind": "files", "path": "."}}, "held_out": 0.0})
    assert held_out_batches(data, {"one": 1.0}, 64, 8, 0, tmp_path) == []
    assert "'one' has no held-out documents" in caplog.text


def test_positions_count_within_documents_and_buckets_cover_the_row() -> None:
    bounds = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    assert document_positions(bounds).tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert position_buckets(64) == [(0, 64)]
    assert position_buckets(8192) == [(0, 128), (128, 512), (512, 2048), (2048, 8192)]


@pytest.mark.parametrize("context", [256, 4096])
def test_needles_fill_the_context_at_their_depth_and_can_be_found(context: int) -> None:
    tokenizer = ByteLevel()
    items = needle_items(tokenizer, context, per_depth=2)
    assert len(items) == 2 * len(DEPTHS)
    for item, depth in zip(items, np.repeat(DEPTHS, 2), strict=True):
        assert item.length == context
        text = tokenizer.decode(item.prompt.tolist())
        answer = tokenizer.decode(item.answer.tolist())
        place = text.index(answer + ".")
        assert place / context == pytest.approx(depth, abs=100 / context)
        assert text.endswith(text[place - 20 : place])
    batches = pack_items(items, context, tokenizer.padding)
    found = exactness(logits_scorer(repeats_itself), batches, needle_groups()).means()
    assert found == dict.fromkeys(needle_groups(), 1.0)


def test_needles_are_the_same_every_time_and_a_short_context_has_none() -> None:
    first, second = (needle_items(ByteLevel(), 512) for _ in range(2))
    assert all((a.prompt == b.prompt).all() for a, b in zip(first, second, strict=True))
    assert needle_items(ByteLevel(), 64) == []


def test_the_last_token_of_an_answer_decides_too() -> None:
    items = task_items(ByteLevel(), per_task=2)
    batches = pack_items(items, 1024, ByteLevel.padding)
    scorer = logits_scorer(knows_all_but_the_last_of_each_answer)
    assert set(exactness(scorer, batches, tuple(TASKS)).means().values()) == {0.0}


def test_task_solutions_are_right() -> None:
    generator = np.random.default_rng(5)
    for _ in range(50):
        problem, solution = TASKS["copy"](generator)
        assert problem.split()[1] == solution.strip() + ":"
        problem, solution = TASKS["reverse"](generator)
        assert problem.split()[1].rstrip(":") == solution.strip()[::-1]
        problem, solution = TASKS["brackets"](generator)
        text = problem.split()[1].rstrip(":") + solution.strip()
        while text != (text := text.replace("()", "").replace("[]", "").replace("{}", "")):
            pass
        assert text == ""
        problem, solution = TASKS["recall"](generator)
        assert f" {problem.split()[-1].rstrip(':')}={solution.strip()} " in problem
        problem, solution = TASKS["add"](generator)
        assert sum(map(int, problem.rstrip(":").split()[1:])) == int(solution)


def test_items_are_documents_and_only_answers_are_labelled() -> None:
    items = [Item("x", np.array([1, 2, 3]), np.array([4, 5])), Item("x", np.array([6]), np.array([7]))]
    (packed,) = pack_items(items, 10, padding=0)
    assert packed.batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0, 0, 0]]
    assert packed.batch.cu_seqlens.tolist() == [0, 5, 7, 10]
    i = IGNORED
    assert packed.batch.labels.tolist() == [[i, i, 4, 5, i, 7, i, i, i, i]]
    with pytest.raises(DataError, match="has 5 tokens, the context 4"):
        pack_items(items, 4, padding=0)


def test_short_rows_share_a_batch_and_all_ranks_have_equally_many() -> None:
    items = [Item("x", np.array([n, 0, n + 1]), np.array([n + 2])) for n in range(1, 4)]
    (first,), (second,) = (pack_items(items, 5, padding=9, rank=rank, size=2) for rank in range(2))
    assert first.batch.tokens.tolist() == [[1, 0, 2, 3, 9], [3, 0, 4, 5, 9]]
    assert first.batch.cu_seqlens.tolist() == [0, 4, 5, 9, 10]
    assert [(question.row, question.first) for question in first.questions] == [(0, 2), (1, 2)]
    assert second.batch.tokens.tolist() == [[2, 0, 3, 4, 9], [9] * 5]
    assert [len(pack_items(items, BATCH_TOKENS, 9)), len(pack_items(items * 2000, BATCH_TOKENS, 9))] == [1, 6]


def test_a_name_without_counts_has_no_mean() -> None:
    tally = Tally.zero(("a", "b"))
    tally.add("a", 3.0, 2)
    assert tally.means() == {"a": 1.5}
