"""What a source must offer: records read at random by number, or documents already tokenised."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shipway.runtime.data.errors import CorruptRecord
from shipway.runtime.data.tokenizers import Tokenizer, Tokens

UNREADABLE = -1
"""Length of a document that cannot be read."""


class Records(Protocol):
    """Texts that can be fetched in any order."""

    @property
    def count(self) -> int:
        """Records, readable or not."""

    @property
    def fingerprint(self) -> str:
        """Changes when the files behind the source change; not when they move."""

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        """Sizes of the runs of records that are read together; None when any order costs the same."""

    def read(self, index: int) -> str:
        """Text of record `index`; raises CorruptRecord, located, when it cannot be had."""


@dataclass(frozen=True)
class Scan:
    """What the packer must know of some documents before it reads them."""

    lengths: NDArray[np.int64]
    """Tokens of each, its end token included; 0 is an empty document, UNREADABLE a corrupt one."""
    hashes: NDArray[np.uint64]
    """Hash of each one's content: it decides between training and held-out."""


class Documents(Protocol):
    """Tokenised documents that can be fetched in any order, in part."""

    @property
    def count(self) -> int:
        """As in `Records`."""

    @property
    def fingerprint(self) -> str:
        """As in `Records`."""

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        """As in `Records`."""

    @property
    def lookahead(self) -> int:
        """Documents worth scanning at once."""

    def scan(self, indices: NDArray[np.int64]) -> Scan:
        """Lengths and content hashes."""

    def tokens(self, index: int, start: int, stop: int) -> Tokens:
        """Tokens start..stop-1 of document `index`, which a scan has found readable."""

    def problem(self, index: int) -> str:
        """Where and why document `index` is unreadable."""

    def hold(self, index: int) -> None:
        """Document `index` will be asked for again and again, until as many calls of `release`."""

    def release(self, index: int) -> None:
        """Undo one `hold`."""


class TokenizedRecords:
    """Records tokenised as they are scanned: whoever walks the source pays for all of it.

    Every data-parallel rank walks the whole source to learn its lengths. With a tokenizer of a few
    MB/s per core that serves up to a few hundred ranks; beyond, pack the source (`shipway data pack`),
    after which lengths come from an index and a rank reads only the rows that are its own.
    """

    lookahead = 32

    def __init__(self, records: Records, tokenizer: Tokenizer) -> None:
        self.count = records.count
        self.fingerprint = records.fingerprint
        self.blocks = records.blocks
        self._records = records
        self._tokenizer = tokenizer
        self._end = np.array([tokenizer.end], dtype=np.int32)
        self._cache: OrderedDict[int, Tokens] = OrderedDict()
        self._held: Counter[int] = Counter()
        self._problems: dict[int, str] = {}

    def scan(self, indices: NDArray[np.int64]) -> Scan:
        """Read and tokenise; the tokens are kept until the next scan."""
        texts: dict[int, str] = {}
        for index in indices.tolist():
            try:
                texts[index] = self._records.read(index)
            except CorruptRecord as problem:
                self._problems[index] = str(problem)
        for index, tokens in zip(texts, self._tokenizer.encode(list(texts.values())), strict=True):
            self._keep(index, tokens)
        lengths = [len(self._cache[i]) if i in texts else UNREADABLE for i in indices.tolist()]
        hashes = [content_hash(texts.get(i, "").encode()) for i in indices.tolist()]
        return Scan(np.array(lengths, dtype=np.int64), np.array(hashes, dtype=np.uint64))

    def tokens(self, index: int, start: int, stop: int) -> Tokens:
        """From the last scans' tokens, or read anew."""
        if index not in self._cache:
            self._keep(index, self._tokenizer.encode([self._records.read(index)])[0])
        return self._cache[index][start:stop]

    def problem(self, index: int) -> str:
        """As found by the scan."""
        return self._problems[index]

    def hold(self, index: int) -> None:
        """Keep its tokens, however many others are read meanwhile."""
        self._held[index] += 1

    def release(self, index: int) -> None:
        """Its tokens may go."""
        self._held[index] -= 1
        self._held += Counter()  # drops zeros

    def _keep(self, index: int, tokens: Tokens) -> None:
        self._cache[index] = np.concatenate([tokens, self._end]) if len(tokens) else tokens
        self._cache.move_to_end(index)
        while len(self._cache) > self.lookahead + len(self._held):
            oldest, kept = self._cache.popitem(last=False)
            if oldest in self._held:
                self._cache[oldest] = kept


def content_hash(content: bytes) -> int:
    """64 bits of BLAKE2b: equal content gets equal treatment, whichever file it lies in."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
