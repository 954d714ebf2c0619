"""From a blueprint's data section to documents."""

from __future__ import annotations

from pathlib import Path

from shipway.runtime.data.documents import Documents, TokenizedRecords
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.sources.whole_files import python_stdlib
from shipway.runtime.data.tokenizers import Tokenizer
from shipway.schemas.training import PythonStdlibSource, Source


def open_source(name: str, source: Source, tokenizer: Tokenizer, folder: Path) -> Documents:
    """Documents of one source; relative paths are looked up in `folder`. Raises DataError."""
    try:
        if isinstance(source, PythonStdlibSource):
            return TokenizedRecords(python_stdlib(), tokenizer)
    except DataError as error:
        raise DataError(f"data source {name!r}: {error}") from error
    raise DataError(f"data source {name!r}: kind {source.kind!r} is not supported")
