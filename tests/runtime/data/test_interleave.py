"""Several documents side by side: nothing lost, nothing twice, no document fills a batch."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.runtime.data.errors import EmptySourceError
from shipway.runtime.data.packing import IGNORED, take_row
from shipway.runtime.data.stream import Piece, SourceStream, Split
from shipway.runtime.data.tokenizers import ByteLevel
from tests.runtime.data.streams import loader, numbered_texts, stream

TEXTS = st.lists(st.text(alphabet="abc", max_size=60), min_size=1, max_size=90).filter(any)
CONTEXTS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def pieces_of(source: SourceStream, contexts: list[int]) -> list[Piece]:
    return [piece for context in contexts for piece in source.take(context)]


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, contexts=CONTEXTS, interleave=st.integers(2, 12), seed=st.integers(0, 3))
def test_stretches_of_a_document_meet_without_gap_or_overlap_whatever_the_rows_length(
    texts: list[str], contexts: list[int], interleave: int, seed: int
) -> None:
    source = stream(texts, interleave=interleave, seed=seed)
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for piece in pieces_of(source, contexts):
        whole = [*texts[piece.document].encode(), ByteLevel.end]
        stop = piece.start + len(piece.tokens)
        assert piece.tokens.tolist() == whole[piece.start : stop]
        assert piece.following == (whole[stop] if stop < len(whole) else None)
        seen[piece.document].update(range(piece.start, stop))
    epochs = source.cursor.epoch + 1
    assert all(times <= epochs for counts in seen.values() for times in counts.values())
    assert source.cursor.tokens == sum(contexts)


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, contexts=CONTEXTS, interleave=st.integers(2, 12), cut=st.integers(0, 60))
def test_skipping_taking_and_resuming_are_alike(
    texts: list[str], contexts: list[int], interleave: int, cut: int
) -> None:
    taken, skipped = stream(texts, interleave=interleave), stream(texts, interleave=interleave)
    pieces_of(taken, contexts[:cut])
    for context in contexts[:cut]:
        skipped.skip_rows(context, 1)
    assert skipped.state_dict() == taken.state_dict()
    resumed = stream(texts, interleave=interleave)
    resumed.load_state_dict(json.loads(json.dumps(taken.state_dict())))
    rest = [16] * 10
    expected = [(p.document, p.start, p.tokens.tolist()) for p in pieces_of(taken, rest)]
    assert [(p.document, p.start, p.tokens.tolist()) for p in pieces_of(resumed, rest)] == expected
    skipped.rewind()
    assert skipped.state_dict() == stream(texts, interleave=interleave).state_dict()


def test_an_epoch_has_every_token_once() -> None:
    texts = numbered_texts(400, 5)
    source = stream(texts, interleave=16)
    seen: Counter[tuple[int, int]] = Counter()
    while source.cursor.epoch == 0:
        for piece in source.take(8):
            seen.update((piece.document, piece.start + i) for i in range(len(piece.tokens)))
    whole = sum(len(text) + 1 for text in texts if text)
    open_at_most = 16 * max(len(text) + 1 for text in texts)
    assert len(seen) >= whole - open_at_most
    assert sum(times - 1 for times in seen.values()) <= open_at_most, "only what the next epoch has begun"


def test_no_long_document_fills_a_batch() -> None:
    texts = ["x" * (5000 if number % 10 == 0 else 40) for number in range(300)]
    together = loader({"a": texts}, interleave=16, rows_per_step=16)
    one_by_one = loader({"a": texts}, rows_per_step=16)
    worst = {}
    for name, each in (("together", together), ("one by one", one_by_one)):
        batches = [batch for _ in range(12) for batch in each.next_step()]
        rows = [{sample.document for sample in batch.samples} for batch in batches]
        steps = [rows[start : start + 16] for start in range(0, len(rows), 16)]
        worst[name] = max(max(Counter(d for row in step for d in row).values()) for step in steps)
    assert worst == {"together": 1, "one by one": 16}


def test_labels_go_on_over_row_borders() -> None:
    source = stream(["abcdefgh" * 9] * 20, interleave=2)
    rows = [take_row(source, 5, ByteLevel.padding) for _ in range(40)]
    for row in rows:
        inside = row.tokens != ByteLevel.end
        assert (row.labels[inside] != IGNORED).all()


def test_lanes_documents_are_read_once_however_many_others_pass() -> None:
    source = stream(["long " * 4000, *numbered_texts(900, 6)], interleave=4)
    reads: Counter[int] = Counter()
    read = source.documents._records.read  # type: ignore[attr-defined]

    def counted(index: int) -> str:
        reads[index] += 1
        return read(index)

    source.documents._records.__dict__["read"] = counted  # type: ignore[attr-defined]
    while source.cursor.epoch == 0:
        source.take(64)
    assert reads[0] <= 2


@pytest.mark.parametrize("held_out", [False, True])
def test_an_empty_side_is_an_error(held_out: bool) -> None:
    source = stream(["only one"] * 30, split=Split(0.0 if held_out else 1.0, held_out), interleave=3)
    with pytest.raises(EmptySourceError):
        source.skip(1)
