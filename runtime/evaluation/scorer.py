"""Loss and hit of every token, in memory for a chunk of logits only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.packing import IGNORED

_CHUNK_LOGITS = 2**26


@dataclass(frozen=True)
class Scores:
    """Of each token of a batch, how its label was predicted."""

    loss: Tensor
    """[b, T] fp32: negative log-likelihood of the label, 0 where it is ignored."""
    correct: Tensor
    """[b, T] bool: whether the label is the likeliest token; false where it is ignored."""


Scorer = Callable[[Batch], Scores]
"""Gives the scores of a whole batch; under context or pipeline parallel it must gather them."""


ReadOut = Callable[[Tensor], Tensor]
"""Logits [b, t, vocabulary] of hidden states [b, t, D]."""


def score_logits(logits: Tensor, labels: Tensor) -> Scores:
    """Scores from logits [b, T, vocabulary] and labels [b, T]."""
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    correct = (logits.argmax(-1) == labels) & (labels != IGNORED)
    return Scores(loss.view_as(labels), correct)


def logits_scorer(logits: Callable[[Batch], Tensor]) -> Scorer:
    """A scorer from any function that gives a batch's logits [b, T, vocabulary]."""
    return torch.no_grad()(lambda batch: score_logits(logits(batch), batch.labels))


def model_scorer(model: nn.Module) -> Scorer:
    """A scorer for a generated model, which never holds all logits of a long row.

    The model reads out in one place, `read_out(hidden)`; while it is scored that place works
    through the row chunk by chunk, inside forward, where sharded weights are gathered.
    """
    read_out: ReadOut = model.read_out  # type: ignore[assignment]

    @torch.no_grad()
    def score(batch: Batch) -> Scores:
        found: list[Scores] = []

        def score_hidden(hidden: Tensor, labels: Tensor | None = None) -> Tensor:
            found.append(_in_chunks(read_out, hidden, batch.labels))
            return hidden.new_zeros(())

        training, own = model.training, vars(model).get("read_out")
        model.eval()
        model.read_out = score_hidden  # type: ignore[assignment]
        try:
            model(batch.tokens, None, batch.cu_seqlens, **batch.image_arguments)
        finally:
            del model.read_out
            if own is not None:  # tensor parallel had put it there
                model.read_out = own
            model.train(training)
        return found[0]

    return score


def _in_chunks(read_out: ReadOut, hidden: Tensor, labels: Tensor) -> Scores:
    """hidden [b, T, D], labels [b, T]; at most `_CHUNK_LOGITS` logits at a time."""
    vocabulary = _whole(read_out(hidden[:, :1])).size(-1)
    columns = max(1, _CHUNK_LOGITS // (vocabulary * hidden.size(0)))
    parts = [
        score_logits(_whole(read_out(hidden[:, start : start + columns])), labels[:, start : start + columns])
        for start in range(0, hidden.size(1), columns)
    ]
    return Scores(torch.cat([p.loss for p in parts], 1), torch.cat([p.correct for p in parts], 1))


def _whole(logits: Tensor) -> Tensor:
    """Logits that tensor parallel has left sharded over the vocabulary are gathered."""
    full: Callable[[], Tensor] | None = getattr(logits, "full_tensor", None)
    return logits if full is None else full()
