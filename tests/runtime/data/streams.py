"""Small made-up sources and loaders that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shipway.runtime.data.documents import TokenizedRecords
from shipway.runtime.data.errors import CorruptRecord
from shipway.runtime.data.loader import Loader, StageShape
from shipway.runtime.data.mixture import Mixture
from shipway.runtime.data.sources.streams import Sources, make_stream
from shipway.runtime.data.stream import SourceStream, Split
from shipway.runtime.data.tokenizers import ByteLevel


@dataclass(frozen=True)
class Texts:
    """Records held in memory; None is one that cannot be read."""

    texts: Sequence[str | None]
    fingerprint: str = "texts"
    blocks: np.ndarray | None = None

    @property
    def count(self) -> int:
        return len(self.texts)

    def read(self, index: int) -> str:
        text = self.texts[index]
        if text is None:
            raise CorruptRecord(f"texts:{index}", "made unreadable")
        return text


def numbered_texts(count: int, seed: int = 0, prefix: str = "") -> list[str]:
    """Texts of differing length, some empty, in which every token names its document."""
    lengths = np.random.default_rng(seed).integers(0, 40, size=count)
    return [f"{prefix}{i}," * int(length) for i, length in enumerate(lengths)]


def stream(
    texts: Sequence[str | None],
    name: str = "a",
    split: Split = Split(),  # noqa: B008 (frozen)
    corrupt_limit: float = 0.0,
    seed: int = 0,
    blocks: Sequence[int] | None = None,
    interleave: int = 1,
) -> SourceStream:
    """A stream over texts as bytes."""
    sizes = None if blocks is None else np.array(blocks)
    documents = TokenizedRecords(Texts(texts, blocks=sizes), ByteLevel())
    return make_stream(name, documents, seed, split, corrupt_limit, interleave)


def loader(
    sources: Mapping[str, Sequence[str | None]],
    rank: int = 0,
    size: int = 1,
    *,
    weights: Mapping[str, float] | None = None,
    stage: str = "first",
    context: int = 32,
    rows_per_step: int = 8,
    micro_batch: int = 1,
    steps: int = 1000,
    prefetch_steps: int = 0,
    seed: int = 0,
    interleave: int = 1,
) -> Loader:
    """A loader over named texts."""
    weights = weights or dict.fromkeys(sources, 1.0)
    return Loader(
        StageShape(stage, context, rows_per_step, micro_batch, steps),
        Sources(
            {name: stream(sources[name], name, seed=seed, interleave=interleave) for name in weights},
            ByteLevel.padding,
        ),
        Mixture(weights),
        {"seed": seed},
        rank,
        size,
        prefetch_steps,
    )
