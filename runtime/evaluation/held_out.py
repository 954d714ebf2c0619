"""Loss on documents that training never sees, by how much context a token had."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shipway.runtime.data.batch import Batch, make_batch
from shipway.runtime.data.errors import EmptySourceError
from shipway.runtime.data.mixture import Mixture
from shipway.runtime.data.packing import IGNORED, Row, take_row
from shipway.runtime.data.sources.streams import open_sources
from shipway.runtime.data.stream import SourceStream, Split
from shipway.runtime.evaluation.scorer import Scorer
from shipway.runtime.evaluation.tally import Tally
from shipway.schemas.model import Model
from shipway.schemas.training import Data

logger = logging.getLogger(__name__)

_FIRST_BUCKET = 128
_BUCKET_GROWTH = 4


def held_out_batches(
    data: Data,
    weights: Mapping[str, float],
    context: int,
    sequences: int,
    seed: int,
    folder: Path,
    rank: int = 0,
    size: int = 1,
    model: Model | None = None,
) -> list[Batch]:
    """The same `sequences` held-out rows whenever asked, rank `rank`'s share of them, a row a batch.

    Every rank gets equally many batches, for all must run the model equally often; where rows do
    not suffice the last have no valid label. A source too small to hold anything out is left out
    with a warning; none at all when that is every source. Raises DataError for unusable sources.
    """
    if sequences == 0:
        return []
    sources = open_sources(data, weights, seed, folder, Split(data.held_out, held_out=True), model)
    streams = {name: stream for name, stream in sources.streams.items() if _holds_out(stream)}
    if not streams:
        return []
    mixture = Mixture({name: weights[name] for name in streams})
    image_token = None if sources.image is None else sources.image.token
    batches = []
    for number in range(-(-sequences // size) * size):
        stream = streams[mixture.next()]
        if number % size != rank:
            stream.skip_rows(context, 1)
            continue
        row = take_row(stream, context, sources.padding, image_token)
        row = row if number < sequences else _unlabelled(row)
        batches.append(make_batch([row], [number], sources.image))
    return batches


def held_out_loss(scorer: Scorer, batches: list[Batch], sources: tuple[str, ...]) -> Tally:
    """Loss over all tokens, by source, and by position within the document.

    Names: `all`, `source/NAME`, `position/FIRST-LAST`; positions count the tokens of the document
    that the row holds before this one, which is the context that the model had.
    """
    buckets = position_buckets(batches[0].tokens.size(1)) if batches else []
    names = [f"position/{first}-{last - 1}" for first, last in buckets]
    tally = Tally.zero(("all", *(f"source/{source}" for source in sources), *names))
    for batch in batches:
        loss, labels = scorer(batch).loss.cpu().double(), batch.labels.cpu()
        valid = labels != IGNORED
        tally.add("all", loss.sum(), valid.sum())
        position = document_positions(batch.cu_seqlens.cpu()).view_as(labels)
        for (first, last), name in zip(buckets, names, strict=True):
            inside = valid & (position >= first) & (position < last)
            tally.add(name, loss[inside].sum(), inside.sum())
        for source, start, stop in _stretches(batch):
            stretch = slice(start, stop)
            tally.add(f"source/{source}", loss.flatten()[stretch].sum(), valid.flatten()[stretch].sum())
    return tally


def position_buckets(context: int) -> list[tuple[int, int]]:
    """First (inclusive) and last (exclusive) position: 0-128, 128-512, 512-2048, ... up to the context."""
    edges = [0]
    edge = _FIRST_BUCKET
    while edge < context:
        edges.append(edge)
        edge *= _BUCKET_GROWTH
    return list(zip(edges, [*edges[1:], context], strict=True))


def document_positions(cu_seqlens: Tensor) -> Tensor:
    """Position of each token within its document, from boundaries [n + 1]."""
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    return torch.arange(int(cu_seqlens[-1])) - starts


def _holds_out(stream: SourceStream) -> bool:
    try:
        stream.skip(1)
    except EmptySourceError as nothing:
        logger.warning("%s", nothing)
        return False
    stream.rewind()
    return True


def _unlabelled(row: Row) -> Row:
    return replace(row, labels=np.full_like(row.labels, IGNORED))


def _stretches(batch: Batch) -> Iterator[tuple[str, int, int]]:
    """Source, first and last (exclusive) flat position of each document of a batch."""
    start = 0
    for sample in batch.samples:
        yield sample.source, start, start + sample.length
        start += sample.length
