"""Prompts with one right answer, packed into rows and scored by exact match under teacher forcing.

An answer counts when every one of its tokens is the likeliest, given the prompt and the answer's
tokens before it: what greedy decoding would have written, for the price of one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.packing import IGNORED
from shipway.runtime.evaluation.scorer import Scorer
from shipway.runtime.evaluation.tally import Tally

BATCH_TOKENS = 4096
"""Rows shorter than this share a batch: the forward pass of a short one costs little but its overhead."""


@dataclass(frozen=True)
class Item:
    """One question."""

    group: str
    """Under which name it is counted."""
    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Question:
    """Where an item's answer stands in a batch."""

    group: str
    row: int
    first: int
    """Position that predicts the answer's first token."""
    last: int
    """Position after the one that predicts its last."""


@dataclass(frozen=True)
class QuestionBatch:
    """Items packed into one batch."""

    batch: Batch
    questions: tuple[Question, ...]


def pack_items(
    items: Sequence[Item], context: int, padding: int, rank: int = 0, size: int = 1
) -> list[QuestionBatch]:
    """Rank `rank`'s share of the items, packed into rows of `context` tokens, each item a document.

    Short rows share a batch. All ranks get equally many batches. Raises DataError when an item is longer
    than the context.
    """
    rows: list[list[Item]] = []
    left = 0
    for item in items:
        if item.length > context:
            raise DataError(f"an item of {item.group!r} has {item.length} tokens, the context {context}")
        if item.length > left:
            rows.append([])
            left = context
        rows[-1].append(item)
        left -= item.length
    rows += [[]] * (-len(rows) % size)
    mine, together = rows[rank::size], max(1, BATCH_TOKENS // context)
    return [
        _question_batch(mine[first : first + together], context, padding)
        for first in range(0, len(mine), together)
    ]


def exactness(scorer: Scorer, batches: Sequence[QuestionBatch], groups: Sequence[str]) -> Tally:
    """Share of answers that are wholly right, by group."""
    tally = Tally.zero(tuple(groups))
    for each in batches:
        correct = scorer(each.batch).correct.cpu()
        for question in each.questions:
            right = correct[question.row, question.first : question.last].all()
            tally.add(question.group, float(right), 1)
    return tally


def _question_batch(rows: Sequence[Sequence[Item]], context: int, padding: int) -> QuestionBatch:
    tokens = np.full((len(rows), context), padding, dtype=np.int64)
    labels = np.full((len(rows), context), IGNORED, dtype=np.int64)
    bounds, questions = [0], []
    for row, items in enumerate(rows):
        start = 0
        for item in items:
            answer = start + len(item.prompt)
            stop = answer + len(item.answer)
            tokens[row, start:answer], tokens[row, answer:stop] = item.prompt, item.answer
            labels[row, answer - 1 : stop - 1] = item.answer
            bounds.append(row * context + stop)
            questions.append(Question(item.group, row, answer - 1, stop - 1))
            start = stop
        if start < context:
            bounds.append((row + 1) * context)
    batch = Batch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
    )
    return QuestionBatch(batch, tuple(questions))
