"""Batches that the parity table trains on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from shipway.runtime.data.batch import Batch, Images
from shipway.runtime.mesh import Mesh

SEQUENCES = 8
MICRO_SEQUENCES = 4
"""Largest micro-batch of a rank."""
CONTEXT_TOKENS = 128
"""Four slices of whole delta-rule chunks of 32 under context parallel."""

PATCH, MERGE = 4, 2
"""Pixels of a patch's side, and patches of the side of what becomes a token, of the model that sees."""
PICTURES = ((), ((20, 16, 12),), ((3, 4, 4), (60, 6, 4), (70, 2, 2)), ((0, 8, 16), (120, 4, 8)))
"""Of rows in turn, where pictures begin, and their rows and columns of patches: some cross slices."""

BatchKind = Literal["packed", "fragments", "uneven", "empty experts", "pictures"]
"""packed: two documents a row, which cross slices, and labels missing unevenly. fragments: documents of 1 to
60 tokens, some of which begin with a slice. uneven: half of the rows count nothing, two have one document and
all labels. empty experts: as packed, with half of the experts biased out of the first step's choices.
pictures: as packed, with three pictures, two, one or none in a row."""


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
    batch = Batch(tokens, labels, torch.tensor([*cuts, tokens.numel()], dtype=torch.int32))
    return _with_pictures(batch, vocabulary - 1) if kind == "pictures" else batch


def _with_pictures(batch: Batch, token: int) -> Batch:
    """The places of pictures taken, and no label asking for them."""
    tokens, labels = batch.tokens.clamp(max=token - 1), batch.labels.clone()
    for row in range(SEQUENCES):
        for start, rows, columns in PICTURES[row % len(PICTURES)]:
            place = slice(start, start + rows * columns // MERGE**2)
            tokens[row, place], labels[row, place] = token, -100
    return replace(batch, tokens=tokens, labels=labels)


def _images(step: int, rows: Iterable[int], token: int) -> Images:
    """The pictures of some rows; a blank one where they have none, as `data.batch` has it."""
    grids, patches = [], []
    for row in rows:
        generator = torch.Generator().manual_seed(SEQUENCES * step + row)
        for _, height, width in PICTURES[row % len(PICTURES)]:
            grids.append((height, width))
            patches.append(torch.randn(height * width, 3 * PATCH**2, generator=generator))
    if not grids:
        grids, patches = [(MERGE, MERGE)], [torch.zeros(MERGE**2, 3 * PATCH**2)]
    return Images(torch.cat(patches), torch.tensor(grids), token)


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
    batches = []
    for start in range(first, first + share, size):
        batch = _rows(whole, start, start + size)
        if kind == "pictures":
            batch = replace(batch, images=_images(step, range(start, start + size), vocabulary - 1))
        batches.append(batch)
    return batches


def _rows(batch: Batch, start: int, end: int) -> Batch:
    low, high = start * CONTEXT_TOKENS, end * CONTEXT_TOKENS
    bounds: Tensor = batch.cu_seqlens
    inside = bounds[(bounds >= low) & (bounds <= high)] - low
    return Batch(batch.tokens[start:end], batch.labels[start:end], inside.to(torch.int32))
