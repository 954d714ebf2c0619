"""Pictures with captions as documents: placeholders for the picture, then the caption."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shipway.runtime.data.documents import UNREADABLE, Scan, content_hash
from shipway.runtime.data.errors import CorruptRecord
from shipway.runtime.data.patches import ImageFormat, Patches, Pixels, patchify
from shipway.runtime.data.tokenizers import Tokenizer, Tokens


class ImageRecords(Protocol):
    """Pictures and captions that can be fetched in any order."""

    @property
    def count(self) -> int:
        """Records, readable or not."""

    @property
    def fingerprint(self) -> str:
        """Changes when the files behind the source change; not when they move."""

    def size(self, index: int) -> tuple[int, int]:
        """Height and width in pixels, cheaply; raises CorruptRecord."""

    def caption(self, index: int) -> str:
        """Text of the picture; raises CorruptRecord."""

    def pixels(self, index: int, height: int, width: int) -> Pixels:
        """[height, width, 3], scaled if that is not the picture's own size; raises CorruptRecord."""


class ImageDocuments:
    """Documents that a row takes whole, for a picture's tokens mean nothing apart."""

    lookahead = 64
    blocks = None

    def __init__(
        self, records: ImageRecords, tokenizer: Tokenizer, image: ImageFormat, largest_tokens: int
    ) -> None:
        self.count = records.count
        self.fingerprint = records.fingerprint
        self.image = image
        self._records = records
        self._tokenizer = tokenizer
        self._largest_tokens = largest_tokens
        self._problems: dict[int, str] = {}

    def scan(self, indices: NDArray[np.int64]) -> Scan:
        """From picture sizes and captions; no pixel is decoded."""
        lengths, hashes = [], []
        for index in indices.tolist():
            try:
                tokens = self._tokens(index)
            except CorruptRecord as problem:
                self._problems[index] = str(problem)
                lengths.append(UNREADABLE)
                hashes.append(0)
            else:
                lengths.append(len(tokens))
                hashes.append(content_hash(tokens.tobytes()))
        return Scan(np.array(lengths, dtype=np.int64), np.array(hashes, dtype=np.uint64))

    def tokens(self, index: int, start: int, stop: int) -> Tokens:
        """Placeholders, caption, end token."""
        return self._tokens(index)[start:stop]

    def patches(self, index: int) -> Patches:
        """The picture; raises CorruptRecord when its pixels turn out to be damaged."""
        height, width = self._fitted(index)
        return patchify(self._records.pixels(index, height, width), self.image)

    def grid(self, index: int) -> tuple[int, int]:
        """Rows and columns of patches, known without the pixels."""
        height, width = self._fitted(index)
        cell, merge = self.image.cell, self.image.merge
        return -(-height // cell) * merge, -(-width // cell) * merge

    def hold(self, index: int) -> None:
        """Nothing: pictures are taken whole, so none is asked for twice."""

    def release(self, index: int) -> None:
        """Nothing, as `hold`."""

    def problem(self, index: int) -> str:
        """As found by the scan."""
        return self._problems[index]

    def _fitted(self, index: int) -> tuple[int, int]:
        return self.image.fitted(*self._records.size(index), self._largest_tokens)

    def _tokens(self, index: int) -> Tokens:
        placeholders = np.full(self.image.tokens(*self._fitted(index)), self.image.token, dtype=np.int32)
        (caption,) = self._tokenizer.encode([self._records.caption(index)])
        return np.concatenate([placeholders, caption, np.array([self._tokenizer.end], dtype=np.int32)])
