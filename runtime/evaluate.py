"""Evaluation while training: held-out loss on the way, everything at a stage's end, and the seesaw guard.

A longer context must not be bought with the short one: the held-out loss of tokens early in their
documents, at a stage's end, is held against that of the stage before (training.evaluation).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from shipway.runtime.data.mixture import stage_weights
from shipway.runtime.evaluation.scorer import model_scorer
from shipway.runtime.evaluation.suite import Suite, make_suite, run_suite
from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.context import sliced_scorer
from shipway.runtime.parallel.data import reshard
from shipway.runtime.stage import StageRun

SHORT_POSITIONS = "held_out/position/0-127"


@dataclass
class Evaluator:
    """A stage's evaluation; the held-out data is read once, when first needed."""

    run: StageRun
    _suite: Suite | None = field(default=None, repr=False)

    def measure(self, whole: bool) -> Mapping[str, float]:
        """Mean of each measure over all ranks: of held-out rows alone, or of the whole suite.

        Where weights have a moving average, that is what is evaluated.
        """
        suite = self._suite or self._make_suite()
        self._suite = suite
        if not whole:
            suite = replace(suite, needle=[], tasks=[], captions=[])
        mesh = self.run.mesh
        model = self.run.trainer.model
        score = model.pipeline.score if model.pipeline else model_scorer(model.parts[0])
        if mesh.size("cp") > 1:
            score = sliced_scorer(score, mesh.group("cp"))
        average = self.run.trainer.average
        with average.in_place() if average else nullcontext():
            tally = run_suite(lambda batch: score(batch.to(mesh.device)), suite)
            for part in model.parts:
                reshard(part)
        return tally.reduced(lambda tensor: sum_over_data_ranks(tensor, mesh)).means()

    def _make_suite(self) -> Suite:
        training, mesh = self.run.context.plan.blueprint.training, self.run.mesh
        return make_suite(
            training.data,
            stage_weights(self.run.blueprint.mix, training.data.sources),
            self.run.stage.context_tokens,
            training.evaluation.sequences,
            training.seed,
            Path(self.run.context.plan.folder or self.run.context.build),
            mesh.data_parallel_rank,
            mesh.data_parallel_size,
            model=self.run.context.plan.blueprint.model,
        )


def sum_over_data_ranks(tensor: torch.Tensor, mesh: Mesh) -> None:
    """Sum a host tensor in place over the ranks that read different samples."""
    on_device = tensor.to(mesh.device)
    mesh.all_reduce(on_device, ["dp_replicate", "dp_shard"])
    tensor.copy_(on_device)


def seesaw(before: float | None, now: float | None, bound: float) -> str | None:
    """What is wrong when the short-context loss has risen by more than `bound` (a share) over a stage."""
    if before is None or now is None or now <= before * (1 + bound):
        return None
    return (
        f"held-out loss of short contexts rose from {before:.4f} to {now:.4f} over this stage"
        f" ({now / before - 1:+.1%}, the bound is {bound:.1%}): keep more of the earlier mix"
    )
