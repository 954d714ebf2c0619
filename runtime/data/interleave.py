"""A source whose rows come from several documents by turns.

Documents read one after the other fill whole batches when they are long: a loss that follows the
document at hand. Here a number of *lanes* each hold a document; a row goes on with the document of one
lane, and a lane that is through with its document takes the next of the epoch's order. All lanes have
their turn before any has its second, in an order drawn by the seed. What a lane holds is five integers in
*tokens*, so that nothing is lost or read twice when the run resumes, at any number of ranks, or when the
next stage has rows of another length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from shipway.runtime.data.documents import Documents
from shipway.runtime.data.errors import EmptySourceError
from shipway.runtime.data.permutation import derive_key, permute
from shipway.runtime.data.stream import Piece, SourceStream, Split

DOCUMENTS_PER_LANE = 8
"""A small source gets fewer lanes: an epoch should not have all its documents open at once."""


@dataclass
class Lane:
    """A document in reading."""

    document: int = 0
    length: int = 0
    """Its tokens; 0 when the lane holds none."""
    start: int = 0
    """Token that comes next."""
    stop: int = 0
    """First token not to be read in this pass over the document."""
    head: int = 0
    """Tokens at the document's beginning that are due once `stop` is reached."""


class InterleavedStream(SourceStream):
    """Like SourceStream, but `take` and `skip` of one row's tokens are the unit: each is a lane's turn.

    The first document of each lane is entered at a place drawn by the seed, and its beginning is read
    after its end: else a run's first rows would all be beginnings of documents.
    """

    def __init__(
        self,
        name: str,
        documents: Documents,
        seed: int,
        split: Split,
        corrupt_limit: float = 0.0,
        lanes: int = 64,
    ) -> None:
        super().__init__(name, documents, seed, split, corrupt_limit)
        self._seed = seed
        self._rows = 0
        self._lanes = [Lane() for _ in range(max(1, min(lanes, documents.count // DOCUMENTS_PER_LANE)))]
        self._turns: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[Piece]:
        """A row of `count` tokens, in order; raises DataError past the corrupt limit."""
        pieces = []
        for document, start, stop, length in self._row(count):
            tokens = self.documents.tokens(document, start, min(stop + 1, length))
            following = int(tokens[-1]) if stop < length else None
            pieces.append(Piece(document, start, tokens[: stop - start], following))
        return pieces

    def skip(self, count: int) -> None:
        """Pass over a row of `count` tokens, reading only lengths."""
        self._row(count)

    def skip_rows(self, context: int, rows: int) -> None:
        """Pass over `rows` rows of `context` tokens."""
        for _ in range(rows):
            self._row(context)

    def rewind(self) -> None:
        """Back to the beginning of the first epoch."""
        super().rewind()
        self._rows = 0
        self._replace_lanes([Lane() for _ in self._lanes])

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what each lane holds."""
        lanes = [list(astuple(lane)) for lane in self._lanes]
        return {**super().state_dict(), "rows": self._rows, "lanes": lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place; raises DataError when the source has changed since."""
        mine = {key: value for key, value in state.items() if key not in ("rows", "lanes")}
        super().load_state_dict(mine)
        self._rows = int(state["rows"])
        self._replace_lanes([Lane(*lane) for lane in state["lanes"]])

    def _replace_lanes(self, lanes: list[Lane]) -> None:
        for lane in self._lanes:
            if lane.length:
                self.documents.release(lane.document)
        self._lanes = lanes
        for lane in lanes:
            if lane.length:
                self.documents.hold(lane.document)

    def _row(self, count: int) -> list[tuple[int, int, int, int]]:
        """Move the next lane over `count` tokens: (document, start, stop, length) of each stretch passed."""
        number = self._turn()
        lane = self._lanes[number]
        self._rows += 1
        stretches = []
        left = count
        while left:
            if lane.start == lane.stop:
                self._next_stretch(number, lane)
            stop = min(lane.start + left, lane.stop)
            stretches.append((lane.document, lane.start, stop, lane.length))
            left -= stop - lane.start
            lane.start = stop
        self.cursor = replace(self.cursor, tokens=self.cursor.tokens + count)
        return stretches

    def _turn(self) -> int:
        """The lane that gives the next row."""
        count = len(self._lanes)
        turn, place = divmod(self._rows, count)
        if self._turns[0] != turn:
            key = derive_key(self._seed, self.name, "lanes", turn)
            self._turns = (turn, permute(np.arange(count, dtype=np.int64), count, key).tolist())
        return self._turns[1][place]

    def _next_stretch(self, number: int, lane: Lane) -> None:
        """Give a lane what it reads next: the rest of its document, or another one."""
        if lane.head:
            lane.start, lane.stop, lane.head = 0, lane.head, 0
            return
        is_first = lane.length == 0
        if not is_first:
            self.documents.release(lane.document)
        lane.document, lane.length = self._next_document()
        self.documents.hold(lane.document)
        lane.start, lane.stop = 0, lane.length
        if is_first:
            key = derive_key(self._seed, self.name, "entry", number)
            lane.start = lane.head = int(key[0] % np.uint64(lane.length))

    def _next_document(self) -> tuple[int, int]:
        """The next document of the epoch's order that has tokens, and how many."""
        passed = 0
        while True:
            window = self._at_cursor()
            at = self.cursor.position - window.start
            length = int(window.lengths[at])
            self._pass_document(window, 0)
            if length:
                return int(window.documents[at]), length
            passed += 1
            if passed > 2 * self.documents.count:
                raise EmptySourceError(self._nothing_found())
