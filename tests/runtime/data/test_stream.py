"""Packing one source: nothing lost, nothing twice, documents apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.runtime.data.documents import content_hash
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.packing import IGNORED, boundaries, take_row
from shipway.runtime.data.stream import SourceStream, Split
from shipway.runtime.data.tokenizers import ByteLevel
from tests.runtime.data.streams import numbered_texts, stream

END = ByteLevel.end
TEXTS = st.lists(st.text(alphabet="abc", max_size=30), min_size=1, max_size=90).filter(any)


def epoch_tokens(texts: list[str]) -> int:
    return sum(len(text) + 1 for text in texts if text)


def documents_read(source: SourceStream, rows: int, context: int) -> list[str]:
    """The documents that `rows` rows hold, put together again across row borders."""
    tokens = np.concatenate(
        [take_row(source, context, ByteLevel.padding).tokens for _ in range(rows)]
    ).tolist()
    text = "".join("\0" if token == END else chr(token) for token in tokens)
    return text.split("\0")


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, context=st.integers(1, 50), seed=st.integers(0, 5))
def test_an_epoch_has_every_document_exactly_once(texts: list[str], context: int, seed: int) -> None:
    source = stream(texts, seed=seed)
    rows = -(-2 * epoch_tokens(texts) // context)
    read = documents_read(source, rows, context)
    kept = sorted(text for text in texts if text)
    assert sorted(read[: len(kept)]) == kept
    assert sorted(read[len(kept) : 2 * len(kept)]) == kept


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, counts=st.lists(st.tuples(st.booleans(), st.integers(1, 60)), min_size=1, max_size=15))
def test_skipping_and_taking_move_the_cursor_alike(texts: list[str], counts: list[tuple[bool, int]]) -> None:
    mixed, taken, resumed = stream(texts), stream(texts), stream(texts)
    for skips, count in counts:
        (mixed.skip if skips else mixed.take)(count)
        expected = [piece.tokens.tolist() for piece in taken.take(count)]
        fresh = stream(texts)
        fresh.load_state_dict(resumed.state_dict())
        assert [piece.tokens.tolist() for piece in fresh.take(count)] == expected
        resumed = fresh
        assert mixed.state_dict() == taken.state_dict() == resumed.state_dict()


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, context=st.integers(1, 40))
def test_labels_are_the_next_token_of_the_same_document(texts: list[str], context: int) -> None:
    source = stream(texts)
    rows = [take_row(source, context, ByteLevel.padding) for _ in range(12)]
    tokens = np.concatenate([row.tokens for row in rows])
    labels = np.concatenate([row.labels for row in rows])
    ends = tokens == END
    assert (labels[ends] == IGNORED).all()
    within = ~ends[:-1]
    assert (labels[:-1][within] == tokens[1:][within]).all()


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, context=st.integers(1, 40), rows_per_batch=st.integers(1, 4))
def test_boundaries_are_at_document_ends_and_row_starts(
    texts: list[str], context: int, rows_per_batch: int
) -> None:
    source = stream(texts)
    rows = [take_row(source, context, ByteLevel.padding) for _ in range(rows_per_batch)]
    tokens = np.concatenate([row.tokens for row in rows])
    after_end = np.flatnonzero(tokens == END) + 1
    expected = {0, *range(0, len(tokens) + 1, context), *after_end.tolist()}
    assert boundaries(rows).tolist() == sorted(expected)


def test_epochs_differ_in_order_and_seeds_too() -> None:
    texts = [chr(97 + i) for i in range(26)]
    source, other = stream(texts), stream(texts, seed=1)
    first, second = documents_read(source, 1, 52), documents_read(source, 1, 52)
    assert first != second
    assert documents_read(other, 1, 52) != first


def test_blocks_are_read_together_and_nothing_is_lost() -> None:
    texts = [f"<{i}>" for i in range(95)]
    source = stream(texts, blocks=[10, 20, 5, 10, 10, 15, 3, 7, 15])
    read = documents_read(source, 1, epoch_tokens(texts))[:-1]
    assert sorted(read) == sorted(texts)
    assert read != texts


def test_training_and_held_out_documents_part_and_copies_stay_together() -> None:
    texts = [f"text {i % 50}" for i in range(200)]
    sides = []
    for held_out in (False, True):
        source = stream(texts, split=Split(0.3, held_out))
        tokens = sum(len(t) + 1 for t in texts if (content_hash(t.encode()) < 0.3 * 2**64) == held_out)
        sides.append(set(documents_read(source, 1, tokens)[:-1]))
        assert source.cursor.epoch == 0
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(texts)
    assert 5 <= len(sides[1]) <= 25


@pytest.mark.parametrize("held_out", [False, True])
def test_an_empty_side_is_an_error_and_no_endless_loop(held_out: bool) -> None:
    source = stream(["only one"] * 3, split=Split(0.0 if held_out else 1.0, held_out))
    with pytest.raises(DataError, match="no held-out documents" if held_out else "no tokens to train on"):
        source.take(1)


def test_corrupt_records_are_counted_and_passed_over_up_to_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts: list[str | None] = list(numbered_texts(100, 4))
    texts[17] = texts[60] = None
    source = stream(texts, corrupt_limit=0.02)
    tokens = epoch_tokens([text or "" for text in texts])
    source.skip(2 * tokens)
    assert source.cursor.corrupt_total in (3, 4)  # trailing records of the second epoch may be left
    assert "skipped texts:17: made unreadable" in caplog.text
    assert "skipped texts:60: made unreadable" in caplog.text


def test_one_corrupt_record_too_many_stops_with_its_place() -> None:
    texts: list[str | None] = list(numbered_texts(100, 4))
    texts[17] = texts[60] = None
    source = stream(texts, corrupt_limit=0.01)
    with pytest.raises(DataError, match=r"2 unreadable records .* allows 1 of 100.*\n  texts:(17|60): made"):
        source.skip(10**6)
