"""Pre-tokenised shards: `NAME.bin` holds tokens, `NAME.idx` says where documents end.

Index layout, little-endian: 8 bytes `SHIPWAY\\0`, uint32 version, uint32 header length, the header
as JSON (tokenizer hash, vocabulary, dtype, counts), padding to a multiple of 8, then per document a
uint64 cumulative token count (its end in the .bin) and a uint64 content hash. A document's tokens
include its end token. The index is written last, so a shard without one was never finished.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shipway.runtime.data.documents import Scan
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.storage import File, LocalStorage, Storage
from shipway.runtime.data.tokenizers import Tokenizer, Tokens

MAGIC = b"SHIPWAY\0"
VERSION = 1
_PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself."""

    tokenizer: str
    """Hash of the tokenizer."""
    vocabulary: int
    end: int
    """The tokenizer's end token."""
    dtype: str
    """uint16 or uint32."""
    documents: int
    tokens: int
    content: int
    """Sum of the documents' content hashes, modulo 2^64."""
    corrupt: int = 0
    """Unreadable records left out while packing."""
    source: str = ""
    """What was packed, in words."""


@dataclass(frozen=True)
class Shard:
    """An opened shard."""

    name: str
    header: ShardHeader
    bin_path: str
    ends: NDArray[np.uint64]
    """[documents] tokens up to and including each document."""
    hashes: NDArray[np.uint64]
    """[documents] content hashes."""
    mapped: NDArray[Any] | None
    """[tokens], memory-mapped; None in object storage, where ranges are fetched."""


class PackedDocuments:
    """The documents of all shards of a folder."""

    lookahead = 4096
    blocks = None

    def __init__(self, storage: Storage, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self._storage = storage
        self._document_ends = np.cumsum([shard.header.documents for shard in shards], dtype=np.int64)
        self.count = int(self._document_ends[-1])
        self.fingerprint = _fingerprint(shards)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises DataError when the shards were written with another tokenizer."""
        for shard in self.shards:
            if shard.header.tokenizer != tokenizer.hash:
                raise DataError(
                    f"{shard.name} was packed with another tokenizer ({shard.header.tokenizer[:20]},"
                    f" vocabulary {shard.header.vocabulary}) than the blueprint's ({tokenizer.hash[:20]},"
                    f" vocabulary {tokenizer.vocabulary}); pack it again, or name the tokenizer used then"
                )

    def scan(self, indices: NDArray[np.int64]) -> Scan:
        """From the index; no token is read."""
        lengths = np.empty(len(indices), dtype=np.int64)
        hashes = np.empty(len(indices), dtype=np.uint64)
        owner = np.searchsorted(self._document_ends, indices, side="right")
        for number in np.unique(owner):
            shard, mine = self.shards[number], owner == number
            local = indices[mine] - (self._document_ends[number] - shard.header.documents)
            ends = shard.ends[local].astype(np.int64)
            starts = np.where(local > 0, shard.ends[local - 1].astype(np.int64), 0)
            lengths[mine] = ends - starts
            hashes[mine] = shard.hashes[local]
        return Scan(lengths, hashes)

    def tokens(self, index: int, start: int, stop: int) -> Tokens:
        """From the memory map, or by one range request."""
        number = int(np.searchsorted(self._document_ends, index, side="right"))
        shard = self.shards[number]
        local = index - int(self._document_ends[number]) + shard.header.documents
        begins = int(shard.ends[local - 1]) if local else 0
        if shard.mapped is not None:
            return shard.mapped[begins + start : begins + stop].astype(np.int32)
        dtype = np.dtype(shard.header.dtype).newbyteorder("<")
        content = self._storage.read(
            shard.bin_path, (begins + start) * dtype.itemsize, (begins + stop) * dtype.itemsize
        )
        return np.frombuffer(content, dtype=dtype).astype(np.int32)

    def hold(self, index: int) -> None:
        """Nothing: reading a document again costs nothing."""

    def release(self, index: int) -> None:
        """Nothing, as `hold`."""

    def problem(self, index: int) -> str:
        """Packing has left unreadable records out, so no document has a problem."""
        raise AssertionError(f"packed document {index} cannot be unreadable")


def open_shards(storage: Storage, root: str) -> PackedDocuments:
    """All finished shards of folder `root` (or the one shard `root`.idx); raises DataError."""
    files = {file.name: file for file in storage.list(root if not root.endswith(".idx") else _folder(root))}
    names = sorted(name for name in files if name.endswith(".idx"))
    if root.endswith(".idx"):
        names = [name for name in names if files[name].path.endswith(root.rsplit("/", 1)[-1])]
    if not names:
        raise DataError(f"{root} holds no .idx file; `shipway data pack` writes them")
    shards = [_open_shard(storage, files[name], files.get(name[:-4] + ".bin")) for name in names]
    shards = [shard for shard in shards if shard.header.documents]
    if not shards:
        raise DataError(f"the shards in {root} hold no documents")
    return PackedDocuments(storage, shards)


def encode_index(header: ShardHeader, ends: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> bytes:
    """The bytes of an index file."""
    text = json.dumps(asdict(header), sort_keys=True).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % 8)
    arrays = ends.astype("<u8").tobytes() + hashes.astype("<u8").tobytes()
    return _PREFIX.pack(MAGIC, VERSION, len(text)) + text + arrays


def read_header(stream: io.BufferedIOBase | Any, name: str) -> tuple[ShardHeader, int]:
    """The header, and the offset at which the arrays start; raises DataError when it is not one."""
    prefix = stream.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise DataError(f"{name} is not a Shipway index file")
    _, version, length = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise DataError(f"{name} has format {version}, and this version reads {VERSION}; pack the data again")
    try:
        header = ShardHeader(**json.loads(stream.read(length)))
    except (ValueError, TypeError) as error:
        raise DataError(f"{name} has a damaged header: {error}") from error
    return header, _PREFIX.size + length


def _open_shard(storage: Storage, index: File, data: File | None) -> Shard:
    with storage.open(index.path) as stream:
        header, offset = read_header(stream, index.path)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    expected_bytes = offset + 16 * header.documents
    if index.size_bytes != expected_bytes:
        raise DataError(f"{index.path} has {index.size_bytes} bytes and should have {expected_bytes}")
    if data is None or data.size_bytes != header.tokens * dtype.itemsize:
        found = "missing" if data is None else f"{data.size_bytes} bytes"
        raise DataError(
            f"the tokens of {index.path} are {found} and should be {header.tokens * dtype.itemsize} bytes;"
            " pack the data again"
        )
    shape = (2, header.documents)
    if isinstance(storage, LocalStorage) and header.documents:
        ends, hashes = np.memmap(index.path, dtype="<u8", mode="r", offset=offset, shape=shape)
        return Shard(index.name, header, data.path, ends, hashes, np.memmap(data.path, dtype=dtype, mode="r"))
    content = storage.read(index.path, offset, index.size_bytes)
    ends, hashes = np.frombuffer(content, dtype="<u8").reshape(shape)
    return Shard(index.name, header, data.path, ends, hashes, None)


def _fingerprint(shards: Sequence[Shard]) -> str:
    """From the headers alone; an index may be many gigabytes."""
    digest = hashlib.sha256()
    for header in (shard.header for shard in shards):
        digest.update(f"{header.documents} {header.tokens} {header.content}\n".encode())
    return digest.hexdigest()[:16]


def _folder(path: str) -> str:
    return path.rsplit("/", 1)[0] if "/" in path else str(Path(path).parent)
