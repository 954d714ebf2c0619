"""The global order of rows, whatever the layout and however often training is interrupted."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shipway.runtime.data.errors import DataError
from shipway.runtime.data.loader import Loader
from tests.runtime.data.streams import loader, numbered_texts

SOURCES = {"a": numbered_texts(70, 1, "a"), "b": numbered_texts(13, 2, "b"), "c": numbered_texts(200, 3, "c")}
WEIGHTS = {"a": 0.5, "b": 0.2, "c": 0.3}
RANKS = (1, 2, 4, 8)


def global_step(loaders: list[Loader]) -> tuple[Tensor, Tensor]:
    """Tokens and labels [rows, context] of one step, put together from all ranks."""
    steps = [each.next_step() for each in loaders]
    total = sum(batch.token_hash for step in steps for batch in step)
    for each in loaders:
        each.update_stream_hash(total)
    batches = [batch for step in steps for batch in step]
    return torch.cat([b.tokens for b in batches]), torch.cat([b.labels for b in batches])


def all_ranks(size: int, **options: object) -> list[Loader]:
    return [loader(SOURCES, rank, size, weights=WEIGHTS, **options) for rank in range(size)]  # type: ignore[arg-type]


def unbroken(steps: int, **options: object) -> tuple[list[tuple[Tensor, Tensor]], list[str | None]]:
    one = all_ranks(1, **options)
    rows, hashes = [], []
    for _ in range(steps):
        rows.append(global_step(one))
        hashes.append(one[0].stream_hash)
    return rows, hashes


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize(("prefetch_steps", "interleave"), [(0, 1), (2, 1), (0, 16), (2, 16)])
def test_every_degree_reads_the_same_global_stream(size: int, prefetch_steps: int, interleave: int) -> None:
    rows, hashes = unbroken(25, interleave=interleave)
    loaders = all_ranks(size, prefetch_steps=prefetch_steps, interleave=interleave)
    for expected, expected_hash in zip(rows, hashes, strict=True):
        tokens, labels = global_step(loaders)
        assert torch.equal(tokens, expected[0])
        assert torch.equal(labels, expected[1])
        assert {each.stream_hash for each in loaders} == {expected_hash}
    for each in loaders:
        each.close()


@settings(max_examples=25, deadline=None)
@given(
    stops=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(RANKS)), min_size=1, max_size=6),
    prefetch_steps=st.sampled_from([0, 3]),
    interleave=st.sampled_from([1, 16]),
)
def test_a_stream_killed_and_resumed_at_other_degrees_is_the_unbroken_one(
    stops: list[tuple[int, int]], prefetch_steps: int, interleave: int
) -> None:
    rows, hashes = unbroken(sum(count for count, _ in stops), interleave=interleave)
    state = None
    done = 0
    for count, size in stops:
        loaders = all_ranks(size, prefetch_steps=prefetch_steps, interleave=interleave)
        for each in loaders:
            if state is not None:
                each.load_state_dict(json.loads(state))
        for expected in rows[done : done + count]:
            assert torch.equal(global_step(loaders)[0], expected[0])
        done += count
        states = {json.dumps(each.state_dict(), sort_keys=True) for each in loaders}
        assert len(states) == 1
        state = states.pop()
        assert json.loads(state)["stream_hash"] == ("" if done == 0 else hashes[done - 1])
        for each in loaders:
            each.close()


def test_micro_batches_split_a_ranks_rows_without_reordering_them() -> None:
    whole = loader(SOURCES, micro_batch=8).next_step()
    parts = loader(SOURCES, micro_batch=2).next_step()
    assert [batch.tokens.shape for batch in parts] == [(2, 32)] * 4
    assert torch.equal(torch.cat([b.tokens for b in parts]), whole[0].tokens)


def test_a_degree_that_does_not_divide_the_batch_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(DataError, match=r"legal degrees are 1, 2, 4$"):
        loader(SOURCES, 0, 3, micro_batch=2)


def test_a_state_of_another_seed_is_refused() -> None:
    state = loader(SOURCES, seed=1).state_dict()
    with pytest.raises(DataError, match="seed = 1 and the plan says 0"):
        loader(SOURCES).load_state_dict(state)


def test_a_state_is_refused_when_files_have_changed() -> None:
    state = loader(SOURCES).state_dict()
    state["sources"]["a"]["fingerprint"] = "other"
    with pytest.raises(DataError, match="'a' has changed since the checkpoint"):
        loader(SOURCES).load_state_dict(state)


def test_a_state_between_two_steps_of_another_batch_is_refused() -> None:
    before = loader(SOURCES, rows_per_step=8)
    before.next_step()
    with pytest.raises(DataError, match="not between two steps"):
        loader(SOURCES, rows_per_step=16).load_state_dict(before.state_dict())


def test_a_stage_ends_after_its_steps() -> None:
    stage = loader(SOURCES, steps=3, prefetch_steps=2)
    assert len(list(stage)) == 3
    with pytest.raises(DataError, match="only 3 steps"):
        stage.next_step()


def test_the_hash_is_unknown_once_a_ranks_part_was_not_given() -> None:
    first = loader(SOURCES, 0, 2)
    first.next_step()
    first.next_step()
    assert first.update_stream_hash(0) is None
