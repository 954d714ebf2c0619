"""From a blueprint's data section to documents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shipway.runtime.data.documents import Documents, Records, TokenizedRecords
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.image_documents import ImageDocuments, ImageRecords
from shipway.runtime.data.patches import ImageFormat
from shipway.runtime.data.shards import PackedDocuments, open_shards
from shipway.runtime.data.sources.concatenated import Concatenated
from shipway.runtime.data.sources.hugging_face import open_dataset
from shipway.runtime.data.sources.image_folder import ImageFolder
from shipway.runtime.data.sources.json_lines import JsonLines
from shipway.runtime.data.sources.parquet import ParquetRows
from shipway.runtime.data.sources.rendered_text import RenderedText
from shipway.runtime.data.sources.text_files import TextLines, WholeFiles, python_stdlib
from shipway.runtime.data.storage import File, open_storage
from shipway.runtime.data.tokenizers import Tokenizer
from shipway.schemas.training import (
    FilesSource,
    HuggingFaceSource,
    ImagesSource,
    PackedSource,
    PythonStdlibSource,
    RenderedTextSource,
)

TextSource = PythonStdlibSource | FilesSource | PackedSource | HuggingFaceSource
_SUFFIXES = (".txt", ".jsonl", ".parquet")


def open_source(name: str, source: TextSource, tokenizer: Tokenizer, folder: Path) -> Documents:
    """Documents of one source; relative paths are looked up in `folder`. Raises DataError."""
    try:
        if isinstance(source, PackedSource):
            return _open_packed(source, tokenizer, folder)
        return TokenizedRecords(open_records(source, folder), tokenizer)
    except DataError as error:
        raise DataError(f"data source {name!r}: {error}") from error


def open_images(
    name: str,
    source: ImagesSource | RenderedTextSource,
    tokenizer: Tokenizer,
    image: ImageFormat,
    folder: Path,
) -> ImageDocuments:
    """Pictures with captions of one source. Raises DataError."""
    try:
        records: ImageRecords
        if isinstance(source, RenderedTextSource):
            records = RenderedText(source.pictures, source.seed, source.lines, source.words)
        else:
            records = ImageFolder(*open_storage(source.path, folder))
    except DataError as error:
        raise DataError(f"data source {name!r}: {error}") from error
    return ImageDocuments(records, tokenizer, image, source.largest_tokens)


def open_records(source: PythonStdlibSource | FilesSource | HuggingFaceSource, folder: Path) -> Records:
    """Texts of a source that is not tokenised yet; raises DataError."""
    if isinstance(source, PythonStdlibSource):
        return python_stdlib()
    if isinstance(source, HuggingFaceSource):
        path = source.path if "://" in source.path else str(folder / Path(source.path).expanduser())
        return open_dataset(path, source.split, source.text_field)
    return _open_files(source, folder)


def cache_folder() -> Path | None:
    """Where indices of large files are kept: $SHIPWAY_CACHE, or the user's cache; None without a home."""
    if "SHIPWAY_CACHE" in os.environ:
        return Path(os.environ["SHIPWAY_CACHE"])
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shipway")
    except RuntimeError:  # no home folder, as in some containers
        return None


def _open_files(source: FilesSource, folder: Path) -> Records:
    storage, root = open_storage(source.path, folder)
    files = storage.list(root)
    by_suffix = {suffix: [f for f in files if f.name.lower().endswith(suffix)] for suffix in _SUFFIXES}
    texts, json_lines, parquet = by_suffix.values()
    parts: list[Records] = []
    if texts:
        lines = source.documents == "line"
        parts.append(TextLines(storage, texts, cache_folder()) if lines else WholeFiles(storage, texts))
    if json_lines:
        parts.append(JsonLines(storage, json_lines, source.text_field, cache_folder()))
    if parquet:
        parts.append(ParquetRows(storage, parquet, source.text_field))
    if not parts:
        raise DataError(f"{root} holds no {', '.join(_SUFFIXES)} file{_other_suffixes(files)}")
    return parts[0] if len(parts) == 1 else Concatenated(parts)


def _other_suffixes(files: Sequence[File]) -> str:
    found = sorted({Path(file.name).suffix or file.name for file in files})
    return f" (it holds {', '.join(found[:5])}; compressed text must be unpacked)" if found else ""


def _open_packed(source: PackedSource, tokenizer: Tokenizer, folder: Path) -> PackedDocuments:
    storage, root = open_storage(source.path, folder)
    documents = open_shards(storage, root)
    documents.check_tokenizer(tokenizer)
    return documents
