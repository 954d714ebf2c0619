"""Write the shards that `shards.py` reads: tokenise once, then train from memory-mapped tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from shipway.runtime.data.documents import UNREADABLE, Records, TokenizedRecords
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.shards import ShardHeader, encode_index
from shipway.runtime.data.tokenizers import Tokenizer, Tokens

_BATCH_DOCUMENTS = TokenizedRecords.lookahead


@dataclass(frozen=True)
class Packing:
    """How to pack; part `part` of `parts` lets several machines share a source."""

    shard_tokens: int = 1_000_000_000
    """Tokens after which a new shard begins."""
    part: int = 0
    parts: int = 1
    corrupt_limit: float = 0.001
    """Share of records that may be unreadable."""


@dataclass
class Packed:
    """What was written."""

    records: int = 0
    """Records of this part."""
    read: int = 0
    """Of these, records read so far."""
    shards: list[str] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)
    """Unreadable records, located."""


def pack(
    records: Records, tokenizer: Tokenizer, folder: Path, packing: Packing, source: str
) -> Iterator[Packed]:
    """Tokenise `records` in their order into shards in `folder`; yields progress, the last time when done.

    Raises DataError when the folder already holds shards of this part, or past the corrupt limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"part-{packing.part:04d}-of-{packing.parts:04d}"
    existing = sorted(folder.glob(f"{prefix}-*.idx"))
    if existing:
        raise DataError(f"{existing[0]} exists already; choose another folder, or remove it first")
    first = records.count * packing.part // packing.parts
    last = records.count * (packing.part + 1) // packing.parts
    documents = TokenizedRecords(records, tokenizer)
    result = Packed(records=last - first)
    writer: _ShardWriter | None = None
    for start in range(first, last, _BATCH_DOCUMENTS):
        indices = np.arange(start, min(start + _BATCH_DOCUMENTS, last), dtype=np.int64)
        scan = documents.scan(indices)
        for index, length, content in zip(indices.tolist(), scan.lengths, scan.hashes, strict=True):
            if writer is None:
                writer = _ShardWriter(folder / f"{prefix}-{len(result.shards):05d}", tokenizer, source)
            if length == UNREADABLE:
                result.problems.append(documents.problem(index))
                writer.corrupt += 1
            elif length:
                writer.add(documents.tokens(index, 0, int(length)), int(content))
            if writer.tokens >= packing.shard_tokens:
                _finish(writer, result)
                writer = None
        result.read += len(indices)
        _check_limit(result, packing)
        yield result
    if writer is not None:
        _finish(writer, result)
    if result.documents == 0:
        raise DataError(f"{source} has no documents to pack")
    yield result


class _ShardWriter:
    """Writes one shard; `finish` puts it in place, index last."""

    def __init__(self, path: Path, tokenizer: Tokenizer, source: str) -> None:
        self.path = path
        self.tokens = 0
        self.corrupt = 0
        self.ends: list[int] = []
        self._hashes: list[int] = []
        self._tokenizer = tokenizer
        self._source = source
        self._dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32).newbyteorder("<")
        self._file: IO[bytes] = path.with_suffix(".bin.partial").open("wb")

    def add(self, tokens: Tokens, content_hash: int) -> None:
        """Append one document, its end token included."""
        self._file.write(tokens.astype(self._dtype).tobytes())
        self.tokens += len(tokens)
        self.ends.append(self.tokens)
        self._hashes.append(content_hash)

    def finish(self) -> None:
        """Make the shard whole and visible."""
        _close_durably(self._file)
        header = ShardHeader(
            tokenizer=self._tokenizer.hash,
            vocabulary=self._tokenizer.vocabulary,
            end=self._tokenizer.end,
            dtype=self._dtype.name,
            documents=len(self.ends),
            tokens=self.tokens,
            content=sum(self._hashes) % 2**64,
            corrupt=self.corrupt,
            source=self._source,
        )
        partial = self.path.with_suffix(".idx.partial")
        with partial.open("wb") as file:
            ends, hashes = np.array(self.ends, dtype=np.uint64), np.array(self._hashes, dtype=np.uint64)
            file.write(encode_index(header, ends, hashes))
            _close_durably(file)
        self.path.with_suffix(".bin.partial").replace(self.path.with_suffix(".bin"))
        partial.replace(self.path.with_suffix(".idx"))


def _finish(writer: _ShardWriter, result: Packed) -> None:
    writer.finish()
    result.shards.append(writer.path.name)
    result.documents += len(writer.ends)
    result.tokens += writer.tokens


def _check_limit(result: Packed, packing: Packing) -> None:
    allowed = int(packing.corrupt_limit * result.records)
    if len(result.problems) > allowed:
        shown = "\n  ".join(result.problems[-5:])
        raise DataError(
            f"{len(result.problems)} unreadable records, and a corrupt limit of {packing.corrupt_limit:g}"
            f" allows {allowed} of {result.records}; repair them or raise the limit. The last:\n  {shown}"
        )


def _close_durably(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
