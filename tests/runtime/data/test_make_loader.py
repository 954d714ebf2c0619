"""From a planned stage and a blueprint's data section to batches."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from shipway.runtime.data.errors import DataError
from shipway.runtime.data.loader import make_loader
from shipway.schemas.layout import Layout
from shipway.schemas.plan import StagePlan
from shipway.schemas.training import Data
from tests.runtime.data.files import write_json_lines, write_text
from tests.runtime.data.streams import numbered_texts


def stage(name: str = "first", context: int = 64, rows: int = 8, micro_batch: int = 2) -> StagePlan:
    """The fields of a planned stage that the data depends on."""
    return StagePlan.model_construct(
        name=name,
        context_tokens=context,
        steps=20,
        sequences_per_step=rows,
        layout=Layout(micro_batch=micro_batch),
    )


@pytest.fixture
def data(tmp_path: Path) -> Data:
    write_text(tmp_path / "books", numbered_texts(80, 1, "book"))
    write_json_lines(tmp_path / "web.jsonl", numbered_texts(150, 2, "web"))
    sources = {
        "books": {"kind": "files", "path": "books"},
        "web": {"kind": "files", "path": "web.jsonl"},
    }
    return Data.from_data({"sources": sources, "held_out": 0.1})


def test_a_stage_is_read_in_its_mix_and_shape(data: Data, tmp_path: Path) -> None:
    with make_loader(stage(), data, 0, 2, 7, tmp_path, mix={"books": 1, "web": 3}) as loader:
        steps = list(loader)
    assert len(steps) == 20
    assert {batch.tokens.shape for step in steps for batch in step} == {(2, 64)}
    rows = loader.state_dict()["mixture"]
    assert rows == {"books": 40, "web": 120}


def test_the_standard_library_is_the_default(tmp_path: Path) -> None:
    with make_loader(stage(context=256), Data(), 0, 1, 0, tmp_path) as loader:
        first = loader.next_step()
    with make_loader(stage(context=256), Data(), 1, 2, 0, tmp_path) as loader:
        second_half = loader.next_step()
    assert first[0].tokens.max() <= 257
    assert torch.equal(torch.cat([b.tokens for b in second_half]), torch.cat([b.tokens for b in first])[4:])


def test_seeds_give_other_orders(data: Data, tmp_path: Path) -> None:
    tokens = []
    for seed in (0, 0, 1):
        with make_loader(stage(), data, 0, 1, seed, tmp_path) as loader:
            tokens.append(torch.cat([batch.tokens for batch in loader.next_step()]))
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"held_out": 0.2}, "held_out = 0.1 and the plan says 0.2"),
        ({"tokenizer": {"kind": "file", "path": "tokenizer.json"}}, "tokenizer = 'bytes-259' and the plan"),
    ],
)
def test_a_state_is_refused_under_another_split_or_tokenizer(
    data: Data, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    from tests.runtime.data.test_tokenizers import write_tokenizer

    write_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    with make_loader(stage(), data, 0, 1, 0, tmp_path) as loader:
        loader.next_step()
        state = loader.state_dict()
    changed = Data.from_data({**data.model_dump(mode="json"), **change})
    with (
        make_loader(stage(), changed, 0, 1, 0, tmp_path) as loader,
        pytest.raises(DataError, match=words),
    ):
        loader.load_state_dict(state)


def test_a_changed_file_is_noticed_on_resume(data: Data, tmp_path: Path) -> None:
    with make_loader(stage(), data, 0, 1, 0, tmp_path) as loader:
        loader.next_step()
        state = loader.state_dict()
    (tmp_path / "books/0003.txt").write_text("this was not what it said")
    with (
        make_loader(stage(), data, 0, 1, 0, tmp_path) as loader,
        pytest.raises(DataError, match="'books' has changed since the checkpoint"),
    ):
        loader.load_state_dict(state)


def test_many_ranks_are_told_to_pack_raw_text(
    data: Data, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_loader(stage(rows=256, micro_batch=1), data, 0, 128, 0, tmp_path)
    assert "each of the 128 data-parallel ranks tokenises whole" in caplog.text
