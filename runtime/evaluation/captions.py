"""Captions of held-out pictures, scored by exact match: what was read, to the last letter."""

from __future__ import annotations

from collections.abc import Sequence

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.packing import IGNORED
from shipway.runtime.evaluation.items import Question, QuestionBatch


def caption_batches(batches: Sequence[Batch]) -> list[QuestionBatch]:
    """A question per picture of held-out rows, counted under its source's name.

    The labels of a picture's document are its caption and end token, so the whole caption and its
    end must be right. Rows without labels, which fill up the ranks' shares, ask nothing.
    """
    return [QuestionBatch(batch, tuple(_questions(batch))) for batch in batches]


def _questions(batch: Batch) -> list[Question]:
    context = batch.tokens.size(1)
    questions = []
    start = 0
    for sample in batch.samples:
        row, column = divmod(start, context)
        labelled = (batch.labels[row, column : column + sample.length] != IGNORED).nonzero()
        if len(labelled):
            first, last = column + int(labelled[0]), column + int(labelled[-1]) + 1
            questions.append(Question(sample.source, row, first, last))
        start += sample.length
    return questions
