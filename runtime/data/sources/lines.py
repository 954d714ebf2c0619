"""Files of lines, any line at random: an index of where lines start, memory-mapped when it is large."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shipway.runtime.data.errors import CorruptRecord
from shipway.runtime.data.storage import File, Storage

_CHUNK_BYTES = 16 * 2**20
_CACHED_FROM_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Place:
    """A line for people."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Lines:
    """All lines of some files, numbered through; blank ones too, so that line numbers hold."""

    def __init__(self, storage: Storage, files: Sequence[File], cache: Path | None) -> None:
        self._storage = storage
        self._files = files
        self._starts = [line_starts(storage, file, cache) for file in files]
        self._ends = np.cumsum([len(starts) for starts in self._starts], dtype=np.int64)
        self.count = int(self._ends[-1]) if files else 0

    def read(self, index: int) -> tuple[bytes, Place]:
        """The line without its end, and where it stands; raises CorruptRecord when it cannot be read."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        file, starts = self._files[number], self._starts[number]
        local = index - int(self._ends[number]) + len(starts)
        stop = int(starts[local + 1]) if local + 1 < len(starts) else file.size_bytes
        place = Place(file.path, local + 1)
        try:
            content = self._storage.read(file.path, int(starts[local]), stop)
        except OSError as error:
            raise CorruptRecord(str(place), str(error)) from error
        return content.rstrip(b"\r\n"), place


def line_starts(storage: Storage, file: File, cache: Path | None) -> NDArray[np.uint64]:
    """Offsets at which the file's lines start; kept in `cache` for files that take long to scan."""
    if cache is None or file.size_bytes < _CACHED_FROM_BYTES:
        return _scan(storage, file)
    key = f"{file.path}\0{file.size_bytes}\0{file.version}"
    stored = cache / "lines" / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".npy")
    if not stored.exists():
        starts = _scan(storage, file)
        try:
            _write(stored, starts)
        except OSError:
            return starts  # a cache that cannot be written only costs time
    mapped: NDArray[np.uint64] = np.load(stored, mmap_mode="r")
    return mapped


def line_at(storage: Storage, file: File, offset: int) -> int:
    """Number of the line that starts at or contains `offset`."""
    lines = 1
    for start in range(0, offset, _CHUNK_BYTES):
        lines += storage.read(file.path, start, min(start + _CHUNK_BYTES, offset)).count(b"\n")
    return lines


def decode_utf8(content: bytes, file: str, first_line: Callable[[], int]) -> str:
    """Text of `content`; raises CorruptRecord that names the line of the first bad byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = first_line() + content.count(b"\n", 0, error.start)
        raise CorruptRecord(f"{file}:{line}", f"not UTF-8: {error.reason}") from error


def _scan(storage: Storage, file: File) -> NDArray[np.uint64]:
    found = [np.zeros(1, dtype=np.uint64)]
    with storage.open(file.path) as stream:
        offset = 0
        while chunk := stream.read(_CHUNK_BYTES):
            newlines = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            found.append((newlines + offset + 1).astype(np.uint64))
            offset += len(chunk)
    starts = np.concatenate(found)
    return starts[starts < file.size_bytes]


def _write(path: Path, starts: NDArray[np.uint64]) -> None:
    """Whole or not at all: several ranks may build the same index at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.save(file, starts)
    partial.replace(path)
