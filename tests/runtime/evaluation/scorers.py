"""Models whose skill is known."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.packing import IGNORED

VOCABULARY = 259
_MATCHED = 12


def knows_all(batch: Batch) -> Tensor:
    """Logits that are certain of every label."""
    return F.one_hot(batch.labels.clamp(min=0), VOCABULARY).float() * 100


def knows_nothing(batch: Batch) -> Tensor:
    """The same logits for every token."""
    return torch.zeros(*batch.tokens.shape, VOCABULARY)


def knows_all_but_the_last_of_each_answer(batch: Batch) -> Tensor:
    """Right everywhere except where the label after is ignored."""
    logits = knows_all(batch)
    following = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORED)
    logits[following == IGNORED] = 0
    return logits


def repeats_itself(batch: Batch) -> Tensor:
    """Predicts what followed the latest earlier occurrence of the last dozen tokens."""
    logits = torch.zeros(*batch.tokens.shape, VOCABULARY)
    for row, tokens in enumerate(batch.tokens.tolist()):
        seen: dict[tuple[int, ...], int] = {}
        for position in range(_MATCHED - 1, len(tokens) - 1):
            recent = tuple(tokens[position - _MATCHED + 1 : position + 1])
            if recent in seen:
                logits[row, position, seen[recent]] = 1
            seen[recent] = tokens[position + 1]
    return logits
