"""Plain text: a document per file, or per line."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from shipway.runtime.data.errors import CorruptRecord
from shipway.runtime.data.sources.lines import Lines, decode_utf8, line_at
from shipway.runtime.data.storage import File, LocalStorage, Storage, fingerprint

_LARGEST_DOCUMENT_BYTES = 4 * 2**20
_CUT_SEARCH_BYTES = 64 * 2**10


@dataclass(frozen=True)
class _Span:
    file: File
    start: int
    stop: int


class WholeFiles:
    """One record per file, UTF-8; a file beyond 4 MiB is cut at lines' ends, for the shuffle to part it."""

    blocks = None

    def __init__(self, storage: Storage, files: Sequence[File]) -> None:
        self._storage = storage
        self._spans = [span for file in files for span in _spans(storage, file)]
        self.count = len(self._spans)
        self.fingerprint = fingerprint(files, "whole files")

    def read(self, index: int) -> str:
        """The file's text; raises CorruptRecord when it is not UTF-8 or cannot be read."""
        span = self._spans[index]
        try:
            content = self._storage.read(span.file.path, span.start, span.stop)
        except OSError as error:
            raise CorruptRecord(span.file.path, str(error)) from error
        return decode_utf8(content, span.file.path, lambda: line_at(self._storage, span.file, span.start))


class TextLines:
    """One record per line of the files."""

    blocks = None

    def __init__(self, storage: Storage, files: Sequence[File], cache: Path | None) -> None:
        self._lines = Lines(storage, files, cache)
        self.count = self._lines.count
        self.fingerprint = fingerprint(files, "text lines")

    def read(self, index: int) -> str:
        """The line, without its end; raises CorruptRecord when it is not UTF-8."""
        content, where = self._lines.read(index)
        return decode_utf8(content, where.file, lambda: where.line)


@cache  # looking through its thousands of files takes a good part of a second
def python_stdlib() -> WholeFiles:
    """The running Python's standard library: every .py file that is UTF-8, installed packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    storage = LocalStorage()
    files = storage.list(str(root), skip=frozenset({"site-packages", "dist-packages", "__pycache__"}))
    files = [file for file in files if file.name.endswith(".py") and _is_utf8(file.path)]
    return WholeFiles(storage, files)


def _is_utf8(path: str) -> bool:
    """Some of the library's tests are files in other encodings, on purpose."""
    try:
        Path(path).read_bytes().decode()
    except (UnicodeDecodeError, OSError):
        return False
    return True


def _spans(storage: Storage, file: File) -> list[_Span]:
    starts = [0]
    while file.size_bytes - starts[-1] > _LARGEST_DOCUMENT_BYTES:
        starts.append(_cut(storage, file, starts[-1] + _LARGEST_DOCUMENT_BYTES))
    return [_Span(file, a, b) for a, b in zip(starts, [*starts[1:], file.size_bytes], strict=True)]


def _cut(storage: Storage, file: File, near: int) -> int:
    """The last line's end shortly before `near`; failing that, the last border between characters."""
    start = near - _CUT_SEARCH_BYTES
    content = storage.read(file.path, start, near)
    newline = content.rfind(b"\n")
    if newline >= 0:
        return start + newline + 1
    # In UTF-8 every byte but a character's first is 0b10xxxxxx.
    firsts = np.flatnonzero(np.frombuffer(content, dtype=np.uint8) & 0xC0 != 0x80)
    return start + int(firsts[-1]) if len(firsts) else near
