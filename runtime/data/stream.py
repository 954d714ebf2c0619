"""One source as an endless stream of tokens, cut into rows, with a cursor of a few integers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shipway.runtime.data.documents import UNREADABLE, Documents, Scan
from shipway.runtime.data.errors import DataError, EmptySourceError
from shipway.runtime.data.order import Order
from shipway.runtime.data.patches import Patches
from shipway.runtime.data.tokenizers import Tokens

logger = logging.getLogger(__name__)

_LOCATIONS_SHOWN = 5


@dataclass(frozen=True)
class Cursor:
    """How far a source has been read; the same whatever read it, in whatever portions."""

    epoch: int = 0
    position: int = 0
    """Place, in the epoch's order, of the document that comes next or is half read."""
    offset: int = 0
    """Tokens of it already used."""
    tokens: int = 0
    """Tokens used since the run began."""
    corrupt: int = 0
    """Unreadable records passed in this epoch."""
    corrupt_total: int = 0
    """Unreadable records passed since the run began."""


@dataclass(frozen=True)
class Split:
    """Which side of the split a stream reads: the document's content decides, so copies stay together."""

    held_out_share: float = 0.0
    held_out: bool = False

    def keeps(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Whether each document belongs to this side."""
        threshold = np.uint64(min(int(self.held_out_share * 2**64), 2**64 - 1))
        is_held_out = hashes < threshold if self.held_out_share < 1 else np.ones(hashes.shape, dtype=bool)
        return is_held_out if self.held_out else ~is_held_out


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document, as they stand in a row."""

    document: int
    start: int
    """First token, counted within the document."""
    tokens: Tokens
    following: int | None
    """The document's next token after `tokens`, wherever it is; None at the document's end."""
    picture: Patches | None = None
    """What the tokens' placeholders stand for."""
    is_labelled: bool = True
    """Whether the loss counts its tokens."""


class _Window:
    """Scanned documents at positions start..stop-1 of an epoch's order."""

    def __init__(
        self, epoch: int, start: int, documents: NDArray[np.int64], scan: Scan, keeps: NDArray[np.bool_]
    ) -> None:
        self.epoch = epoch
        self.start = start
        self.stop = start + len(documents)
        self.documents = documents
        self.unreadable = scan.lengths == UNREADABLE
        self.lengths = np.where(keeps & ~self.unreadable, scan.lengths, 0)
        self.ends = np.cumsum(self.lengths)
        """Tokens of the window up to and including each document."""


class SourceStream:
    """The documents of a source, end to end, epoch after epoch.

    `take` returns the next tokens, `skip` passes over them reading only lengths; both leave the
    cursor at the same place, so that ranks which take different rows agree on where all stand.
    """

    def __init__(
        self, name: str, documents: Documents, seed: int, split: Split, corrupt_limit: float = 0.0
    ) -> None:
        if documents.count == 0:
            raise DataError(f"data source {name!r} has no documents")
        self.name = name
        self.documents = documents
        self.cursor = Cursor()
        self._order = Order(documents.count, documents.blocks, seed, name)
        self._split = split
        self._corrupt_limit = corrupt_limit
        self._window: _Window | None = None

    def take(self, count: int) -> list[Piece]:
        """The next `count` tokens, in document order; raises DataError past the corrupt limit."""
        pieces = []
        for window, start, stop in self._consume(count):
            first = int(np.searchsorted(window.ends, start, side="right"))
            last = int(np.searchsorted(window.ends, stop, side="left"))
            for at in range(first, last + 1):
                if window.lengths[at]:
                    pieces.append(self._piece(window, at, start, stop))
        return pieces

    def skip(self, count: int) -> None:
        """Pass over `count` tokens without reading them."""
        for _ in self._consume(count):
            pass

    def skip_rows(self, context: int, rows: int) -> None:
        """Pass over `rows` rows of `context` tokens without reading them."""
        self.skip(context * rows)

    def rewind(self) -> None:
        """Back to the beginning of the first epoch."""
        self.cursor = Cursor()

    def state_dict(self) -> dict[str, Any]:
        """The cursor and what it refers to."""
        return {**asdict(self.cursor), "fingerprint": self.documents.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved cursor; raises DataError when the source has changed since."""
        if state["fingerprint"] != self.documents.fingerprint:
            raise DataError(
                f"data source {self.name!r} has changed since the checkpoint was written (files were added,"
                " removed or resized), so its order cannot be continued; restore the files, or give the"
                " changed data a source name of its own"
            )
        self.cursor = Cursor(**{key: value for key, value in state.items() if key != "fingerprint"})

    def _consume(self, count: int) -> Iterator[tuple[_Window, int, int]]:
        """Move the cursor over `count` tokens; yields each window with the range of its tokens passed."""
        fruitless = 0
        while count:
            window = self._at_cursor()
            at = self.cursor.position - window.start
            start = int(window.ends[at] - window.lengths[at]) + self.cursor.offset
            stop = min(start + count, int(window.ends[-1]))
            fruitless = 0 if stop > start else fruitless + window.stop - self.cursor.position
            if fruitless > 2 * self.documents.count:
                raise EmptySourceError(self._nothing_found())
            yield window, start, stop
            count -= stop - start
            self._move(window, stop, more=count > 0)

    def _move(self, window: _Window, stop: int, more: bool) -> None:
        """Set the cursor just past token `stop` of the window, or at the window's end if more is wanted."""
        at = len(window.ends) if more else int(np.searchsorted(window.ends, stop, side="left"))
        offset = 0
        if not more:
            left = int(window.ends[at]) - stop
            offset = int(window.lengths[at]) - left if left else 0
            at += 0 if left else 1
        old = self.cursor
        before = old.position - window.start
        used = stop - int(window.ends[before] - window.lengths[before]) - old.offset
        corrupt = int(window.unreadable[before:at].sum())
        self.cursor = Cursor(
            epoch=old.epoch,
            position=window.start + at,
            offset=offset,
            tokens=old.tokens + used,
            corrupt=old.corrupt + corrupt,
            corrupt_total=old.corrupt_total + corrupt,
        )
        if corrupt:
            self._report(window.documents[before:at][window.unreadable[before:at]])

    def _pass_document(self, window: _Window, tokens: int) -> None:
        """Move the cursor over one whole document, of which `tokens` are used."""
        old = self.cursor
        at = old.position - window.start
        corrupt = int(window.unreadable[at])
        self.cursor = replace(
            old,
            position=old.position + 1,
            tokens=old.tokens + tokens,
            corrupt=old.corrupt + corrupt,
            corrupt_total=old.corrupt_total + corrupt,
        )
        if corrupt:
            self._report(window.documents[at : at + 1])

    def _at_cursor(self) -> _Window:
        """The window that holds the cursor, in a new epoch if the last one is over."""
        if self.cursor.position == self.documents.count:
            self.cursor = replace(self.cursor, epoch=self.cursor.epoch + 1, position=0, corrupt=0)
        window, cursor = self._window, self.cursor
        if (
            window is None
            or window.epoch != cursor.epoch
            or not window.start <= cursor.position < window.stop
        ):
            lookahead = self.documents.lookahead
            start = cursor.position // lookahead * lookahead
            stop = min(start + lookahead, self.documents.count)
            documents = self._order.documents(cursor.epoch, start, stop)
            scan = self.documents.scan(documents)
            window = _Window(cursor.epoch, start, documents, scan, self._split.keeps(scan.hashes))
            self._window = window
        return window

    def _piece(self, window: _Window, at: int, start: int, stop: int) -> Piece:
        """The part of the window's document `at` that lies in tokens start..stop-1 of the window."""
        document, length = int(window.documents[at]), int(window.lengths[at])
        begins = int(window.ends[at]) - length
        first, end = max(start - begins, 0), min(stop - begins, length)
        tokens = self.documents.tokens(document, first, min(end + 1, length))
        following = int(tokens[-1]) if end < length else None
        return Piece(document, first, tokens[: end - first], following)

    def _report(self, unreadable: NDArray[np.int64]) -> None:
        """Log what was skipped; raises DataError once it is more than the limit allows."""
        problems = [self.documents.problem(int(document)) for document in unreadable]
        for problem in problems:
            logger.warning("data source %s: skipped %s", self.name, problem)
        allowed = int(self._corrupt_limit * self.documents.count)
        if self.cursor.corrupt > allowed:
            shown = "\n  ".join(problems[-_LOCATIONS_SHOWN:])
            raise DataError(
                f"data source {self.name!r}: {self.cursor.corrupt} unreadable records in this epoch, and"
                f" data.corrupt_limit = {self._corrupt_limit:g} allows {allowed} of {self.documents.count};"
                f" repair them or raise the limit. The last ones:\n  {shown}"
            )

    def _nothing_found(self) -> str:
        if self._split.held_out:
            return (
                f"data source {self.name!r} has no held-out documents: none of its {self.documents.count}"
                f" fell into data.held_out = {self._split.held_out_share:g}; raise it, or add documents"
            )
        return (
            f"data source {self.name!r} has no tokens to train on: all of its {self.documents.count}"
            " documents are empty, unreadable, or held out; lower data.held_out, or add documents"
        )
