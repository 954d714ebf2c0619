"""Batches that the parity table trains on."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shipway.runtime.data.batch import Batch
from shipway.runtime.mesh import Mesh

SEQUENCES = 8
MICRO_SEQUENCES = 4
"""Largest micro-batch of a rank."""
CONTEXT_TOKENS = 128
"""Four slices of whole delta-rule chunks of 32 under context parallel."""

BatchKind = Literal["packed", "fragments", "uneven", "empty experts"]
"""packed: two documents a row, which cross slices, and labels missing unevenly. fragments: documents of 1 to
60 tokens, some of which begin with a slice. uneven: half of the rows count nothing, two have one document and
all labels. empty experts: as packed, with half of the experts biased out of the first step's choices."""


def shunned_experts(kind: BatchKind, experts: int) -> slice:
    """Experts that get no token in the first step: of two expert-parallel ranks, all of the second's."""
    return slice(experts // 2 if kind == "empty experts" else experts, experts)


def step_rows(step: int, vocabulary: int, kind: BatchKind = "packed") -> Batch:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    shape = (SEQUENCES, CONTEXT_TOKENS)
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    labels = torch.randint(0, vocabulary, shape, generator=generator)
    for row in range(SEQUENCES):
        labels[row, : _ignored(kind, row)] = -100
    cuts = [row * CONTEXT_TOKENS + cut for row in range(SEQUENCES) for cut in (0, *_cuts(kind, row))]
    return Batch(tokens, labels, torch.tensor([*cuts, tokens.numel()], dtype=torch.int32))


def _ignored(kind: BatchKind, row: int) -> int:
    """Tokens at the start of a row that no label counts."""
    if kind == "uneven":
        return (CONTEXT_TOKENS, 0, CONTEXT_TOKENS, 113)[row % 4]
    return (29 * row) % 101


def _cuts(kind: BatchKind, row: int) -> list[int]:
    """Where documents begin within a row, besides its start."""
    if kind == "uneven":
        return [] if row % 2 else [CONTEXT_TOKENS - 1]
    if kind == "fragments":
        return [[1, 2, 31, 32, 33, 93], [32, 64, 96], [95], [64]][row % 4]
    return [19 + 11 * row]


def micro_batches(step: int, mesh: Mesh, vocabulary: int, kind: BatchKind = "packed") -> list[Batch]:
    """This rank's micro-batches of a step."""
    whole = step_rows(step, vocabulary, kind)
    share = SEQUENCES // mesh.data_parallel_size
    first = mesh.data_parallel_rank * share
    size = mesh.layout.micro_batch
    return [_rows(whole, start, start + size) for start in range(first, first + share, size)]


def _rows(batch: Batch, start: int, end: int) -> Batch:
    low, high = start * CONTEXT_TOKENS, end * CONTEXT_TOKENS
    bounds: Tensor = batch.cu_seqlens
    inside = bounds[(bounds >= low) & (bounds <= high)] - low
    return Batch(batch.tokens[start:end], batch.labels[start:end], inside.to(torch.int32))
