"""The batches of one training stage, in one global order that no layout changes.

The rows of a stage are numbered. Row k is the next `context` tokens of the source that the mixture
deals k to; a step is the next `sequences_per_step` rows; data-parallel rank r of n takes the r-th
n-th of each step and passes over the others by their lengths. Hence every rank knows where all
sources stand, the state needs no communication, and it says nothing about n.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shipway.runtime.data.batch import Batch, make_batch, signed
from shipway.runtime.data.documents import TokenizedRecords
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.mixture import Mixture, stage_weights
from shipway.runtime.data.packing import Row, take_row
from shipway.runtime.data.prefetch import Prefetcher
from shipway.runtime.data.sources.streams import Sources, open_sources
from shipway.runtime.data.stream import SourceStream, Split
from shipway.runtime.data.tokenizers import make_tokenizer
from shipway.schemas.model import Model
from shipway.schemas.plan import StagePlan
from shipway.schemas.training import Data

STATE_FORMAT = 2
_RAW_TEXT_RANKS = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageShape:
    """What a stage asks of its data."""

    name: str
    context: int
    """Tokens in a row."""
    rows_per_step: int
    """Rows in an optimizer step, over the whole cluster."""
    micro_batch: int
    """Rows in a micro-batch of one rank."""
    steps: int


@dataclass(frozen=True)
class Step:
    """What one rank trains on between two optimizer updates."""

    batches: tuple[Batch, ...]
    """Micro-batches, in order."""
    state: dict[str, Any]
    """State of the data after this step."""


class Loader:
    """The steps of a stage, for one data-parallel rank; made by `make_loader`."""

    def __init__(
        self,
        shape: StageShape,
        sources: Sources,
        mixture: Mixture,
        identity: Mapping[str, Any],
        rank: int = 0,
        size: int = 1,
        prefetch_steps: int = 2,
        pin_memory: bool = False,
    ) -> None:
        check_division(shape, size)
        self.shape = shape
        self.stream_hash: str | None = ""
        """Running hash over the tokens of all ranks, step by step; None once a rank's part was not given."""
        self._streams = sources.streams
        self._padding = sources.padding
        self._image = sources.image
        self._mixture = mixture
        self._identity = dict(identity)
        self._rank, self._size = rank, size
        self._prefetch_steps = prefetch_steps
        self._pin_memory = pin_memory
        self._prefetcher: Prefetcher[Step] | None = None
        self._wait_seconds = 0.0
        self._rows_read = 0
        self._idle_sources: dict[str, Any] = {}
        self._hash_is_due = False
        self._state = self._snapshot()

    @property
    def step(self) -> int:
        """Steps of this stage already returned."""
        return int(self._state["rows"]) // self.shape.rows_per_step

    @property
    def data_wait_seconds(self) -> float:
        """Time that training has waited for data."""
        return self._wait_seconds + (self._prefetcher.wait_seconds if self._prefetcher else 0.0)

    @property
    def corrupt_records(self) -> dict[str, int]:
        """Unreadable records skipped since the run began, by source."""
        return {name: int(source["corrupt_total"]) for name, source in self._state["sources"].items()}

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        """The steps that are left in the stage, each as its micro-batches."""
        while self.step < self.shape.steps:
            yield self.next_step()

    def next_step(self) -> tuple[Batch, ...]:
        """Micro-batches of the next optimizer step. Raises DataError, also past the stage's last step."""
        if self.step >= self.shape.steps:
            raise DataError(f"stage {self.shape.name!r} has only {self.shape.steps} steps")
        if self._hash_is_due:
            self.stream_hash = None
        step = self._next()
        self._state = step.state
        self._hash_is_due = True
        if self._size == 1:
            self.update_stream_hash(sum(batch.token_hash for batch in step.batches))
        return step.batches

    def update_stream_hash(self, total: int) -> str | None:
        """Take the last step into `stream_hash`; `total` sums its batches' `token_hash` over all ranks.

        The sum may have wrapped as int64 does. With one data-parallel rank this happens by itself.
        """
        if self._hash_is_due and self.stream_hash is not None:
            link = f"{self.stream_hash}:{signed(total)}"
            self.stream_hash = hashlib.blake2b(link.encode(), digest_size=16).hexdigest()
        self._hash_is_due = False
        return self.stream_hash

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last step returned: JSON, the same on every rank and layout."""
        return {**self._state, "stream_hash": self.stream_hash}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved at any data-parallel degree, in this stage or an earlier one.

        In a new stage the sources go on where they stood, so that nothing is seen again. Raises
        DataError when tokenizer, seed, split or source files are not those of the state.
        """
        self.close()
        check_identity(self._identity, state)
        same_stage = state["stage"] == self.shape.name
        if same_stage:
            check_position(self.shape, state)
        self._rows_read = int(state["rows"]) if same_stage else 0
        self._mixture.load_state_dict(state["mixture"] if same_stage else {})
        for name, source in state["sources"].items():
            if name in self._streams:
                self._streams[name].load_state_dict(source)
            else:
                self._idle_sources[name] = source
        self.stream_hash = state["stream_hash"]
        self._hash_is_due = False
        self._state = self._snapshot()

    def close(self) -> None:
        """Stop reading ahead. The loader can only be used again after `load_state_dict`."""
        if self._prefetcher is not None:
            self._wait_seconds += self._prefetcher.wait_seconds
            self._prefetcher.close()
            self._prefetcher = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> Step:
        if self._prefetch_steps == 0:
            started = time.perf_counter()
            step = self._read_step()
            self._wait_seconds += time.perf_counter() - started
            return step
        if self._prefetcher is None:
            left = self.shape.steps - self.step
            self._prefetcher = Prefetcher(self._read_step, left, self._prefetch_steps)
        return self._prefetcher.get()

    def _read_step(self) -> Step:
        """This rank's rows of the next step; runs in the background thread when reading ahead."""
        share = self.shape.rows_per_step // self._size
        mine = range(self._rank * share, (self._rank + 1) * share)
        skipped: Counter[str] = Counter()
        rows: list[Row] = []
        for number in range(self.shape.rows_per_step):
            name = self._mixture.next()
            if number in mine:
                self._streams[name].skip_rows(self.shape.context, skipped.pop(name, 0))
                rows.append(self._take_row(self._streams[name]))
            else:
                skipped[name] += 1
        for name, count in skipped.items():
            self._streams[name].skip_rows(self.shape.context, count)
        batches = self._batches(rows, self._rows_read + mine.start)
        self._rows_read += self.shape.rows_per_step
        return Step(batches, self._snapshot())

    def _take_row(self, stream: SourceStream) -> Row:
        image_token = None if self._image is None else self._image.token
        return take_row(stream, self.shape.context, self._padding, image_token)

    def _batches(self, rows: list[Row], first: int) -> tuple[Batch, ...]:
        size = self.shape.micro_batch
        batches = [
            make_batch(
                rows[i : i + size], list(range(first + i, first + min(i + size, len(rows)))), self._image
            )
            for i in range(0, len(rows), size)
        ]
        return tuple(batch.pin_memory() if self._pin_memory else batch for batch in batches)

    def _snapshot(self) -> dict[str, Any]:
        sources = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {
            "format": STATE_FORMAT,
            **self._identity,
            "stage": self.shape.name,
            "context": self.shape.context,
            "rows": self._rows_read,
            "mixture": self._mixture.state_dict(),
            "sources": {**self._idle_sources, **sources},
        }


def make_loader(
    stage: StagePlan,
    data: Data,
    dp_rank: int,
    dp_size: int,
    seed: int,
    folder: Path,
    *,
    mix: Mapping[str, float] | None = None,
    model: Model | None = None,
    prefetch_steps: int = 2,
    pin_memory: bool = False,
) -> Loader:
    """The training batches of a planned stage for data-parallel rank `dp_rank` of `dp_size`.

    `folder` is where relative paths start, `mix` the stage's weights (all sources equally when
    None), and `model` is needed where sources have images. `prefetch_steps` steps are read ahead in a
    thread; 0 reads when asked. Raises DataError.
    """
    shape = StageShape(
        name=stage.name,
        context=stage.context_tokens,
        rows_per_step=stage.sequences_per_step,
        micro_batch=stage.layout.micro_batch,
        steps=stage.steps,
    )
    weights = stage_weights(mix, data.sources)
    sources = open_sources(data, weights, seed, folder, Split(data.held_out, held_out=False), model)
    if dp_rank == 0:
        _warn_of_raw_text(sources, dp_size)
    return Loader(
        shape,
        sources,
        Mixture(weights),
        identity(data, seed, folder),
        dp_rank,
        dp_size,
        prefetch_steps,
        pin_memory,
    )


def _warn_of_raw_text(sources: Sources, dp_size: int) -> None:
    for name, stream in sources.streams.items():
        if dp_size > _RAW_TEXT_RANKS and isinstance(stream.documents, TokenizedRecords):
            logger.warning(
                "data source %s is raw text, which each of the %d data-parallel ranks tokenises whole to find"
                " its rows; `shipway data pack` spares them that",
                name,
                dp_size,
            )


def identity(data: Data, seed: int, folder: Path) -> dict[str, Any]:
    """What must be the same for a saved cursor to mean the same place."""
    tokenizer = make_tokenizer(data.tokenizer, folder)
    return {
        "tokenizer": tokenizer.hash,
        "seed": seed,
        "held_out": data.held_out,
        "interleave": data.interleave,
    }


def check_division(shape: StageShape, size: int) -> None:
    """Every rank must get equally many whole micro-batches; raises DataError with the legal degrees."""
    micro_batches, left = divmod(shape.rows_per_step, shape.micro_batch)
    if left or micro_batches % size:
        legal = [n for n in range(1, micro_batches + 1) if not left and micro_batches % n == 0]
        raise DataError(
            f"stage {shape.name!r}: {shape.rows_per_step} sequences per step in micro-batches of"
            f" {shape.micro_batch} cannot be shared equally by {size} data-parallel ranks"
            + (f"; legal degrees are {', '.join(map(str, legal))}" if legal else "")
        )


def check_identity(expected: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises DataError when `state` belongs to another tokenizer, seed or split."""
    if state.get("format") != STATE_FORMAT:
        raise DataError(
            f"the data state has format {state.get('format')!r}; this version reads {STATE_FORMAT}"
        )
    for key, value in expected.items():
        if state[key] != value:
            raise DataError(
                f"the checkpoint's data was read with {key} = {state[key]!r} and the plan says {value!r};"
                " its place in the data cannot be continued with another"
            )


def check_position(shape: StageShape, state: Mapping[str, Any]) -> None:
    """Raises DataError when a state of this stage does not fall between two of its steps."""
    if state["context"] != shape.context or state["rows"] % shape.rows_per_step:
        raise DataError(
            f"the checkpoint stands after {state['rows']} sequences of {state['context']} tokens, which is"
            f" not between two steps of {shape.rows_per_step} sequences of {shape.context}; continue with the"
            " stage's old context and global batch, or give the changed stage a new name"
        )
