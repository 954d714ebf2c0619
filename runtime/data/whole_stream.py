"""A source whose documents are never cut: rows are filled up with padding instead."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from shipway.runtime.data.errors import CorruptRecord, DataError
from shipway.runtime.data.image_documents import ImageDocuments
from shipway.runtime.data.patches import blank
from shipway.runtime.data.stream import Piece, SourceStream, Split

logger = logging.getLogger(__name__)


class WholeDocumentStream(SourceStream):
    """Pictures with captions, next-fit: a row takes documents until the next one does not fit.

    A document longer than a row is passed over. One whose pixels turn out to be damaged keeps its
    place, with a blank picture and no labels, for other ranks have already counted on its length.
    """

    def __init__(
        self, name: str, documents: ImageDocuments, seed: int, split: Split, corrupt_limit: float = 0.0
    ) -> None:
        super().__init__(name, documents, seed, split, corrupt_limit)
        self._images = documents
        self._damaged = 0

    def take(self, count: int) -> list[Piece]:
        """Whole documents of at most `count` tokens together."""
        return [self._whole_piece(document, length) for document, length in self._row(count)]

    def skip_rows(self, context: int, rows: int) -> None:
        """Pass over `rows` rows of `context` tokens."""
        for _ in range(rows):
            for _ in self._row(context):
                pass

    def _row(self, context: int) -> Iterator[tuple[int, int]]:
        """Documents of the next row with their lengths; the cursor ends behind the last of them."""
        left, passed = context, 0
        while True:
            window = self._at_cursor()
            at = self.cursor.position - window.start
            document, length = int(window.documents[at]), int(window.lengths[at])
            if left < length <= context:
                return
            passed += 1
            if passed > 2 * self.documents.count and left == context:
                raise DataError(f"data source {self.name!r} has no document that fits in {context} tokens")
            fits = 0 < length <= context
            self._pass_document(window, length if fits else 0)
            if fits:
                left -= length
                yield document, length

    def _whole_piece(self, document: int, length: int) -> Piece:
        tokens = self.documents.tokens(document, 0, length)
        try:
            return Piece(document, 0, tokens, None, self._images.patches(document))
        except CorruptRecord as problem:
            logger.warning("data source %s: blank picture for %s", self.name, problem)
        self._damaged += 1
        if self._damaged > int(self._corrupt_limit * self.documents.count):
            raise DataError(
                f"data source {self.name!r}: {self._damaged} pictures have damaged pixels, more than"
                f" data.corrupt_limit = {self._corrupt_limit:g} allows of {self.documents.count}"
            )
        rows, columns = self._images.grid(document)
        picture = blank(rows, columns, self._images.image)
        return Piece(document, 0, tokens, None, picture, is_labelled=False)
