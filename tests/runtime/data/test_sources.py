"""Every kind of source gives the same texts, any record at random."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from shipway.runtime.data.documents import Records
from shipway.runtime.data.errors import CorruptRecord, DataError
from shipway.runtime.data.sources import lines, text_files
from shipway.runtime.data.sources.open import open_records, open_source
from shipway.runtime.data.stream import SourceStream, Split
from shipway.runtime.data.tokenizers import ByteLevel
from shipway.schemas.training import FilesSource, HuggingFaceSource, PackedSource, PythonStdlibSource
from tests.runtime.data.files import write_dataset, write_json_lines, write_parquet, write_text

TEXTS = [f"text {i}: grüße\nzweite Zeile {'x' * (i % 9)}" for i in range(40)]


def read_all(records: Records) -> list[str]:
    """In an order that is not the files' own."""
    order = np.random.default_rng(0).permutation(records.count)
    return sorted(records.read(int(i)) for i in order)


def files(path: str, **options: object) -> FilesSource:
    return FilesSource.from_data({"path": path, **options})


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_text_json_lines_parquet_and_arrow_give_the_same_texts(tmp_path: Path) -> None:
    write_text(tmp_path / "text", TEXTS)
    write_json_lines(tmp_path / "json/a.jsonl", TEXTS)
    write_parquet(tmp_path / "rows.parquet", TEXTS)
    write_dataset(tmp_path / "saved", TEXTS)
    sources = [
        files("text"),
        files("json"),
        files("rows.parquet"),
        HuggingFaceSource(path="saved"),
        files(f"file://{tmp_path}/json/a.jsonl"),
    ]
    for source in sources:
        assert read_all(open_records(source, tmp_path)) == sorted(TEXTS)


def test_a_folder_may_mix_kinds_at_any_depth(tmp_path: Path) -> None:
    write_text(tmp_path / "all/deep/er", TEXTS[:10])
    write_json_lines(tmp_path / "all/b.jsonl", TEXTS[10:25])
    write_parquet(tmp_path / "all/deep/c.parquet", TEXTS[25:])
    (tmp_path / "all/README").write_text("not data")
    (tmp_path / "all/.hidden.txt").write_text("not data either")
    records = open_records(files("all"), tmp_path)
    assert read_all(records) == sorted(TEXTS)
    assert records.blocks is not None
    assert records.blocks.sum() == records.count


def test_object_storage_is_read_by_ranges(tmp_path: Path, memory: fsspec.AbstractFileSystem) -> None:
    write_json_lines(tmp_path / "a.jsonl", TEXTS)
    write_parquet(tmp_path / "b.parquet", TEXTS)
    memory.put(str(tmp_path / "a.jsonl"), "/bucket/data/a.jsonl")
    memory.put(str(tmp_path / "b.parquet"), "/bucket/data/deep/b.parquet")
    records = open_records(files("memory://bucket/data"), tmp_path)
    assert read_all(records) == sorted(TEXTS + TEXTS)


def test_an_unknown_scheme_and_a_missing_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot reach wherever:// storage"):
        open_records(files("wherever://bucket"), tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        open_records(files("nowhere"), tmp_path)
    with pytest.raises(DataError, match="memory://empty does not exist"):
        open_records(files("memory://empty"), tmp_path)


def test_a_folder_without_text_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with pytest.raises(DataError, match=r"no \.txt, \.jsonl, \.parquet file \(it holds \.zst; compressed"):
        open_records(files("."), tmp_path)


def test_lines_of_text_can_be_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"eins\r\nzwei\n\ndrei")
    records = open_records(files("a.txt", documents="line"), tmp_path)
    assert [records.read(i) for i in range(records.count)] == ["eins", "zwei", "", "drei"]


def test_a_large_file_is_cut_at_a_lines_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_LARGEST_DOCUMENT_BYTES", 100)
    monkeypatch.setattr(text_files, "_CUT_SEARCH_BYTES", 40)
    text = "".join(f"Zeile {i} ä\n" for i in range(50)) + "ü" * 150
    (tmp_path / "a.txt").write_text(text)
    records = open_records(files("a.txt"), tmp_path)
    parts = [records.read(i) for i in range(records.count)]
    assert "".join(parts) == text
    assert len(parts) > 8
    assert all(len(part.encode()) <= 100 for part in parts)
    assert all(part.endswith("\n") for part in parts[:4])


def test_the_line_index_of_a_large_file_is_kept_and_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_CACHED_FROM_BYTES", 0)
    monkeypatch.setattr(lines, "_CHUNK_BYTES", 64)
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "cache"))
    write_json_lines(tmp_path / "a.jsonl", TEXTS)
    for _ in range(2):
        assert read_all(open_records(files("a.jsonl"), tmp_path)) == sorted(TEXTS)
    assert len(list((tmp_path / "cache/lines").iterdir())) == 1
    write_json_lines(tmp_path / "a.jsonl", [*TEXTS[::-1], "one more"])
    assert read_all(open_records(files("a.jsonl"), tmp_path)) == sorted([*TEXTS, "one more"])


def test_fingerprints_follow_content_and_not_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_text(tmp_path / name, TEXTS)
    one, two = (open_records(files(name), tmp_path).fingerprint for name in ("one", "two"))
    assert one == two
    (tmp_path / "two/0000.txt").write_text("longer than it was before, by far and by all measures")
    assert open_records(files("two"), tmp_path).fingerprint != one


def test_the_standard_library_is_found_without_installed_packages() -> None:
    records = open_records(PythonStdlibSource(), Path())
    assert records.count > 100
    first = records.read(0)
    root = Path(sysconfig.get_paths()["stdlib"])
    assert first == (root / "__future__.py").read_text()


def test_hugging_face_splits_are_named(tmp_path: Path) -> None:
    write_dataset(tmp_path / "both/train", TEXTS)
    (tmp_path / "both/dataset_dict.json").write_text('{"splits": ["train"]}')
    assert open_records(HuggingFaceSource(path="both", split="train"), tmp_path).count == len(TEXTS)
    with pytest.raises(DataError, match="has the splits train; name one"):
        open_records(HuggingFaceSource(path="both"), tmp_path)
    with pytest.raises(DataError, match="without splits"):
        open_records(HuggingFaceSource(path="both/train", split="test"), tmp_path)
    with pytest.raises(DataError, match="has no field 'body'; set `text_field` to one of: text"):
        open_records(HuggingFaceSource(path="both", split="train", text_field="body"), tmp_path)


@pytest.mark.parametrize(
    ("line", "where", "reason"),
    [
        (b'{"text": "bad \xff byte"}', "a.jsonl:2", "not UTF-8"),
        (b'{"text": "cut off', "a.jsonl:2", "not JSON"),
        (b'{"body": "no text"}', "a.jsonl:2", "no text in field 'text'"),
        (b'{"text": 7}', "a.jsonl:2", "no text in field 'text'"),
        (b"[1, 2]", "a.jsonl:2", "no text in field 'text'"),
        (rb'{"text": "\ud83d"}', "a.jsonl:2", "not Unicode text"),
    ],
)
def test_a_bad_json_line_is_located(tmp_path: Path, line: bytes, where: str, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good too"}\n')
    records = open_records(files("a.jsonl"), tmp_path)
    assert (records.read(0), records.read(2)) == ("good", "good too")
    with pytest.raises(CorruptRecord, match=reason) as caught:
        records.read(1)
    assert caught.value.where == str(tmp_path / where)


def test_bad_utf8_in_text_is_located_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    with pytest.raises(CorruptRecord, match=r"a\.txt:3: not UTF-8"):
        open_records(files("a.txt"), tmp_path).read(0)
    with pytest.raises(CorruptRecord, match=r"a\.txt:3: not UTF-8"):
        open_records(files("a.txt", documents="line"), tmp_path).read(2)


def test_damaged_parquet_is_located_and_the_rest_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d/good.parquet", ["good", None])
    write_parquet(tmp_path / "d/short.parquet", TEXTS)
    content = (tmp_path / "d/short.parquet").read_bytes()
    (tmp_path / "d/short.parquet").write_bytes(content[: len(content) // 2])
    records = open_records(files("d"), tmp_path)
    assert records.count == 3
    assert records.read(0) == "good"
    with pytest.raises(CorruptRecord, match="no text in column 'text'"):
        records.read(1)
    with pytest.raises(CorruptRecord, match=r"short\.parquet: not a readable Parquet file"):
        records.read(2)


def test_a_damaged_row_group_costs_only_its_own_rows(tmp_path: Path) -> None:
    texts = [f"{i} " + np.random.default_rng(i).bytes(300).hex() for i in range(20)]
    write_parquet(tmp_path / "a.parquet", texts, rows_per_group=10)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[8:200] = b"\xff" * 192
    (tmp_path / "a.parquet").write_bytes(content)
    records = open_records(files("a.parquet"), tmp_path)
    with pytest.raises(CorruptRecord, match=r"row 3 of row group 0: damaged row group"):
        records.read(3)
    assert records.read(13) == texts[13]


def test_a_parquet_column_that_is_not_there_is_a_mistake_in_the_blueprint(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(DataError, match="no column 'body'; set `text_field` to one of: text"):
        open_records(files("a.parquet", text_field="body"), tmp_path)


def test_row_groups_are_decoded_once_per_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    write_parquet(tmp_path / "a.parquet", [f"text {i}" for i in range(300)], rows_per_group=10)
    decoded: list[int] = []
    original = pq.ParquetFile.read_row_group

    def counted(self: pq.ParquetFile, i: int, *args: object, **options: object) -> object:
        decoded.append(i)
        return original(self, i, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    documents = open_source("a", files("a.parquet"), ByteLevel(), tmp_path)
    stream = SourceStream("a", documents, 0, Split())
    stream.take(sum(len(f"text {i}") + 1 for i in range(300)))
    assert stream.cursor.position == 300
    assert sorted(decoded) == list(range(30))


def test_a_source_is_named_in_its_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data source 'books': .*nowhere does not exist"):
        open_source("books", PackedSource(path="nowhere"), ByteLevel(), tmp_path)
