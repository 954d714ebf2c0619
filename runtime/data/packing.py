"""Rows of exactly `context` tokens from consecutive tokens of a source."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shipway.runtime.data.patches import Patches
from shipway.runtime.data.stream import Piece, SourceStream

IGNORED = -100
"""Label of a token whose successor belongs to another document."""
PADDING = -1
"""Document number of what fills a row that no whole document fits into."""


@dataclass(frozen=True)
class Sample:
    """Where a stretch of a row came from."""

    source: str
    document: int
    start: int
    """First token, counted within the document."""
    length: int


@dataclass(frozen=True)
class Row:
    """One packed sequence."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    """The next token of the same document, even where the next row holds it; else IGNORED."""
    samples: tuple[Sample, ...]
    """Its documents, in order; their lengths add up to the row. Padding is the document PADDING."""
    pictures: tuple[Patches, ...] = ()
    """In the order of their placeholders."""


def take_row(stream: SourceStream, context: int, padding: int, image_token: int | None = None) -> Row:
    """The next row of a stream. What does not fit stays in the stream, so that no token is lost.

    Where documents cannot be cut, `padding` fills the row. An image's placeholders are no labels.
    """
    pieces = stream.take(context)
    left = context - sum(len(piece.tokens) for piece in pieces)
    if left:
        filler = np.full(left, padding, dtype=np.int32)
        pieces.append(Piece(PADDING, 0, filler, None, is_labelled=False))
    return Row(
        tokens=np.concatenate([piece.tokens for piece in pieces]).astype(np.int64),
        labels=np.concatenate([_labels(piece, image_token) for piece in pieces]),
        samples=tuple(Sample(stream.name, p.document, p.start, len(p.tokens)) for p in pieces),
        pictures=tuple(piece.picture for piece in pieces if piece.picture is not None),
    )


def boundaries(rows: list[Row]) -> NDArray[np.int32]:
    """Document boundaries over the flattened rows: 0, then the end of each document."""
    lengths = [sample.length for row in rows for sample in row.samples]
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def row_hash(row: Row, number: int) -> int:
    """64 bits that name tokens and documents' lengths of row `number`; sums of them name a set of rows."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8)
    digest.update(row.tokens.astype("<i4").tobytes())
    for picture in row.pictures:
        digest.update(picture.values.astype("<f4").tobytes())
    digest.update(np.array([sample.length for sample in row.samples], dtype="<i8").tobytes())
    return int.from_bytes(digest.digest(), "little")


def _labels(piece: Piece, image_token: int | None) -> NDArray[np.int64]:
    following = IGNORED if piece.following is None else piece.following
    labels = np.append(piece.tokens[1:].astype(np.int64), following)
    if image_token is not None:
        labels[labels == image_token] = IGNORED
    return labels if piece.is_labelled else np.full_like(labels, IGNORED)
