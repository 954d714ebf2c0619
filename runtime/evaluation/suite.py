"""Everything a stage is evaluated on, made once and run as often as the blueprint asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.tokenizers import make_tokenizer
from shipway.runtime.evaluation.captions import caption_batches
from shipway.runtime.evaluation.held_out import held_out_batches, held_out_loss
from shipway.runtime.evaluation.items import QuestionBatch, exactness, pack_items
from shipway.runtime.evaluation.needle import needle_groups, needle_items
from shipway.runtime.evaluation.scorer import Scorer
from shipway.runtime.evaluation.tally import Tally, joined
from shipway.runtime.evaluation.tasks import TASKS, task_items
from shipway.schemas.model import Model
from shipway.schemas.training import Data, ImagesSource, RenderedTextSource

PICTURES = (ImagesSource, RenderedTextSource)


@dataclass(frozen=True)
class Suite:
    """One rank's share of a stage's evaluation."""

    sources: tuple[str, ...]
    held_out: list[Batch]
    needle: list[QuestionBatch]
    tasks: list[QuestionBatch]
    captions: list[QuestionBatch]


def make_suite(
    data: Data,
    weights: Mapping[str, float],
    context: int,
    sequences: int,
    seed: int,
    folder: Path,
    rank: int = 0,
    size: int = 1,
    *,
    model: Model | None = None,
    per_depth: int = 4,
    per_task: int = 16,
) -> Suite:
    """Rank `rank`'s share of `sequences` held-out rows, needles at the full context, short tasks, captions.

    All ranks get equally many batches of each. Raises DataError as the sources do.
    """
    tokenizer = make_tokenizer(data.tokenizer, folder)
    needles = needle_items(tokenizer, context, per_depth, seed=seed)
    tasks = [item for item in task_items(tokenizer, per_task, seed) if item.length <= context]
    used = tuple(name for name, weight in weights.items() if weight > 0)
    pictures = {name: 1.0 for name in used if isinstance(data.sources[name], PICTURES)}
    shape = (context, sequences, seed, folder, rank, size, model)
    return Suite(
        sources=used,
        held_out=held_out_batches(data, weights, *shape),
        captions=caption_batches(held_out_batches(data, pictures, *shape)) if pictures else [],
        needle=pack_items(needles, context, tokenizer.padding, rank, size),
        tasks=pack_items(tasks, context, tokenizer.padding, rank, size),
    )


def run_suite(scorer: Scorer, suite: Suite) -> Tally:
    """All measures of this rank's share, to be summed over the data-parallel ranks.

    Names: held_out/all, held_out/source/NAME, held_out/position/0-127, ... (losses),
    needle/depth/0.5, ..., tasks/copy, ..., captions/SOURCE (shares of exact answers).
    """
    return joined(
        {
            "held_out": held_out_loss(scorer, suite.held_out, suite.sources),
            "needle": exactness(scorer, suite.needle, needle_groups()),
            "tasks": exactness(scorer, suite.tasks, tuple(TASKS)),
            "captions": exactness(scorer, suite.captions, suite.sources),
        }
    )
