"""Packed shards: the round trip, and what is said of shards that are torn or foreign."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from shipway.runtime.data.__main__ import main
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.loader import Loader, StageShape
from shipway.runtime.data.mixture import Mixture
from shipway.runtime.data.pack import Packing, pack
from shipway.runtime.data.shards import open_shards
from shipway.runtime.data.sources.open import open_source
from shipway.runtime.data.sources.streams import Sources
from shipway.runtime.data.storage import LocalStorage
from shipway.runtime.data.stream import SourceStream, Split
from shipway.runtime.data.tokenizers import ByteLevel
from shipway.schemas.training import PackedSource
from tests.runtime.data.files import write_json_lines
from tests.runtime.data.streams import Texts, numbered_texts, stream

TEXTS = numbered_texts(150, 9)


def write_shards(folder: Path, texts: Sequence[str | None], **options: int | float) -> list[str]:
    *_, result = pack(Texts(texts), ByteLevel(), folder, Packing(**options), "texts")  # type: ignore[arg-type]
    return result.shards


def packed_stream(path: str, folder: Path, split: Split = Split()) -> SourceStream:  # noqa: B008 (frozen)
    return SourceStream("a", open_source("a", PackedSource(path=path), ByteLevel(), folder), 0, split)


def test_documents_come_back_as_they_were(tmp_path: Path) -> None:
    names = write_shards(tmp_path, TEXTS, shard_tokens=700)
    assert len(names) > 3
    documents = open_shards(LocalStorage(), str(tmp_path))
    kept = [text for text in TEXTS if text]
    assert documents.count == len(kept)
    scan = documents.scan(np.arange(documents.count)[::-1])
    for index, length in zip(range(documents.count)[::-1], scan.lengths.tolist(), strict=True):
        tokens = documents.tokens(index, 0, length).tolist()
        assert tokens == [*kept[index].encode(), ByteLevel.end]
        assert documents.tokens(index, 1, 3).tolist() == tokens[1:3]


def test_the_shuffle_and_the_split_are_those_of_the_texts(tmp_path: Path) -> None:
    kept = [text for text in TEXTS if text]
    write_shards(tmp_path, kept, shard_tokens=500)
    for split in (Split(0.2, held_out=False), Split(0.2, held_out=True)):
        from_texts, from_shards = stream(kept, split=split), packed_stream(".", tmp_path, split)
        for count in (1, 100, 5000, 37):
            expected = np.concatenate([piece.tokens for piece in from_texts.take(count)])
            got = np.concatenate([piece.tokens for piece in from_shards.take(count)])
            assert got.tolist() == expected.tolist()
            from_texts.skip(count)
            from_shards.skip(count)
        assert from_texts.cursor == from_shards.cursor


def test_parts_packed_apart_hold_every_document_once(tmp_path: Path) -> None:
    for part in range(3):
        write_shards(tmp_path, TEXTS, part=part, parts=3)
    documents = open_shards(LocalStorage(), str(tmp_path))
    lengths = documents.scan(np.arange(documents.count)).lengths
    assert lengths.tolist() == [len(text) + 1 for text in TEXTS if text]


def test_shards_in_object_storage_are_read_by_ranges(tmp_path: Path) -> None:
    write_shards(tmp_path, TEXTS)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/shards", recursive=True)
    try:
        local, remote = packed_stream(".", tmp_path), packed_stream("memory://shards", tmp_path)
        assert [p.tokens.tolist() for p in local.take(999)] == [p.tokens.tolist() for p in remote.take(999)]
        assert local.state_dict() == remote.state_dict()
    finally:
        memory.rm("/shards", recursive=True)


def test_ranks_of_a_packed_source_read_only_their_own_rows(tmp_path: Path) -> None:
    write_shards(tmp_path, TEXTS)
    read: list[int] = []

    def make(rank: int, size: int) -> Loader:
        source = packed_stream(".", tmp_path)
        original = source.documents.tokens
        source.documents.tokens = lambda i, a, b: (read.append(b - a), original(i, a, b))[1]  # type: ignore[method-assign]
        return Loader(
            StageShape("s", 32, 8, 1, 10), Sources({"a": source}, 258), Mixture({"a": 1.0}), {}, rank, size, 0
        )

    whole = torch.cat([batch.tokens for batch in make(0, 1).next_step()])
    read.clear()
    last = torch.cat([batch.tokens for batch in make(3, 4).next_step()])
    assert torch.equal(last, whole[6:])
    assert sum(read) <= 2 * 32 + len(read)  # each piece may look one token ahead


@pytest.mark.parametrize("damage", ["short tokens", "short index", "no tokens", "foreign file", "bad header"])
def test_torn_and_foreign_shards_are_refused(tmp_path: Path, damage: str) -> None:
    (name,) = write_shards(tmp_path, TEXTS)
    index, tokens = tmp_path / f"{name}.idx", tmp_path / f"{name}.bin"
    match damage:
        case "short tokens":
            tokens.write_bytes(tokens.read_bytes()[:-2])
        case "short index":
            index.write_bytes(index.read_bytes()[:-8])
        case "no tokens":
            tokens.unlink()
        case "foreign file":
            index.write_bytes(b"MMIDIDX\0\0" + bytes(100))
        case "bad header":
            index.write_bytes(index.read_bytes().replace(b'"vocabulary"', b'"vocabularx"'))
    with pytest.raises(DataError, match=f"{name}.*(should|not a Shipway index|damaged header)"):
        open_shards(LocalStorage(), str(tmp_path))


def test_a_shard_that_was_never_finished_is_not_seen(tmp_path: Path) -> None:
    packing = pack(Texts(TEXTS), ByteLevel(), tmp_path, Packing(), "texts")
    next(packing)
    packing.close()
    with pytest.raises(DataError, match=r"holds no \.idx file"):
        open_shards(LocalStorage(), str(tmp_path))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    class Other(ByteLevel):
        hash = "other"

    write_shards(tmp_path, TEXTS)
    with pytest.raises(DataError, match="packed with another tokenizer"):
        open_source("a", PackedSource(path="."), Other(), tmp_path)


def test_packing_counts_unreadable_records_up_to_the_limit(tmp_path: Path) -> None:
    texts = [*TEXTS, None]
    write_shards(tmp_path / "some", texts, corrupt_limit=0.01)
    assert open_shards(LocalStorage(), str(tmp_path / "some")).shards[0].header.corrupt == 1
    with pytest.raises(DataError, match=r"1 unreadable records.*\n  texts:150: made unreadable"):
        write_shards(tmp_path / "none", texts, corrupt_limit=0.001)


def test_a_folder_is_not_packed_over(tmp_path: Path) -> None:
    write_shards(tmp_path, TEXTS)
    with pytest.raises(DataError, match="exists already"):
        write_shards(tmp_path, TEXTS)


def test_the_command_packs_and_inspects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "in/a.jsonl", TEXTS, "body")
    assert main(["pack", "in", "--out", "shards", "--text-field", "body", "--shard-tokens", "2000"]) == 0
    assert "0 unreadable records skipped" in capsys.readouterr().out
    assert main(["inspect", "shards", "--tokenizer", "bytes", "--document", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    kept = [text for text in TEXTS if text]
    assert sum(shard["documents"] for shard in report["shards"]) == len(kept)
    assert report["preview"] == kept[1][:64]
    assert main(["inspect", "shards", "--tokenizer", "bytes", "--document", "100000"]) == 2
    assert "there is no document 100000" in capsys.readouterr().err
    assert main(["inspect", "in"]) == 2
    assert main(["pack", "nowhere", "--out", "x"]) == 2
