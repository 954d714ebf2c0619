"""The loop of optimizer steps of one stage: train, measure, save, stop when asked, survive bad steps."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from shipway.runtime.checkpoint_folder import Manifest
from shipway.runtime.context import Context, Position
from shipway.runtime.details import DetailWatch, describe_slow
from shipway.runtime.evaluate import SHORT_POSITIONS, Evaluator, seesaw
from shipway.runtime.exit_codes import ExitCode, Fatal, Retryable
from shipway.runtime.garbage import Garbage
from shipway.runtime.measure import MemoryWatch, step_metrics
from shipway.runtime.metrics import StepMetrics
from shipway.runtime.profiling import REQUEST_FILE, Profiler, ProfileRequests, describe_profile
from shipway.runtime.progress import describe_evaluation
from shipway.runtime.schedules import learning_rate
from shipway.runtime.stage import StageRun, open_stage
from shipway.runtime.trainer import StepResult
from shipway.schemas.plan import StagePlan

STATUS_SECONDS = 1.0
"""Shortest time between two writes of status.json."""


def train_stage(context: Context, stage: StagePlan, start: tuple[Path, Manifest] | None) -> ExitCode:
    """Run a stage to its end or to an agreed stop; it ends in a checkpoint either way."""
    run = open_stage(context, stage, start)
    outcome = _loop(run)
    context.checkpointer.wait()
    run.close()
    return outcome


def _loop(run: StageRun) -> ExitCode:
    context, stage = run.context, run.stage
    checkpoints = context.plan.blueprint.training.checkpoints
    guard, memory, evaluator = NonFiniteGuard(run), MemoryWatch(run), Evaluator(run)
    status, watch, garbage = _StatusWriter(run), Watching(run), Garbage()
    while run.position.stage_step < stage.steps:
        result = _one_step(run, memory, status, watch)
        context.watchdog.step_ends()
        garbage.step_ends()
        guard.judge(result)
        _evaluate(run, evaluator)
        agreed = context.stop.agreed(
            context.groups.control, watch.requests.pending(), context.checkpointer.has_failed
        )
        if agreed.save_failed:
            _give_up_save(run)
        stopping = agreed.stop
        watch.profiler.start(agreed.profile_steps)
        ended = run.position.stage_step == stage.steps
        if stopping or ended or run.position.step % checkpoints.every_steps == 0:
            context.watchdog.phase("checkpoint")
            run.save()
        if stopping and not ended:
            context.checkpointer.wait()
            status.write(force=True)
            context.display.message(f"stopped as asked after step {run.position.step}, saved")
            return ExitCode.PREEMPTED
    status.write(force=True)
    context.watchdog.pause()
    return ExitCode.DONE


def _give_up_save(run: StageRun) -> None:
    """Leave as soon as a save has failed: training on would only lose more steps. Raises Retryable."""
    run.context.checkpointer.wait()
    raise Retryable("another rank could not write its part of a checkpoint")


def _one_step(run: StageRun, memory: MemoryWatch, status: _StatusWriter, watch: Watching) -> StepResult:
    context, at = run.context, run.position
    rate = learning_rate(run.blueprint.learning_rate, at.stage_step, run.stage.steps)
    began, waited = time.perf_counter(), run.loader.data_wait_seconds
    context.watchdog.step_begins(at.step + 1)
    watch.details.begin()
    batches = run.loader.next_step()
    result = run.trainer.step(batches, rate, on_phase=context.watchdog.phase)
    if run.mesh.data_parallel_size > 1:
        run.loader.update_stream_hash(result.token_hash)
    seconds = time.perf_counter() - began
    tokens = run.stage.sequences_per_step * run.stage.context_tokens
    run.position = Position(at.stage, at.stage_step + 1, at.step + 1, at.tokens + tokens)
    waited = run.loader.data_wait_seconds - waited
    metrics = step_metrics(run, result, rate, seconds, waited, memory.peak())
    _publish(run, metrics)
    watch.step_ends(result)
    status.write()
    if warning := memory.warning():
        context.display.message(warning)
    return result


def _evaluate(run: StageRun, evaluator: Evaluator) -> None:
    """Held-out loss when it is due; everything at the stage's end, with the seesaw guard."""
    options, at = run.context.plan.blueprint.training.evaluation, run.position
    ended = at.stage_step == run.stage.steps
    if not ended and at.step % options.every_steps:
        return
    run.context.watchdog.phase("evaluation")
    measures = evaluator.measure(whole=ended)
    if run.context.metrics:
        run.context.metrics.write_evaluation(at.stage, at.step, measures)
    run.context.display.message(describe_evaluation(at.stage, at.step, measures))
    if ended:
        now = measures.get(SHORT_POSITIONS)
        problem = seesaw(run.short_loss, now, options.short_loss_bound)
        run.short_loss = now
        if problem and options.beyond_bound == "stop":
            raise Fatal(f"stage {at.stage}: {problem}")
        if problem:
            run.context.display.message(f"stage {at.stage}: {problem}")


def _publish(run: StageRun, metrics: StepMetrics) -> None:
    if run.context.metrics:
        run.context.metrics.write(metrics)
    run.context.display.step(metrics)


class Watching:
    """What looks closer at some steps: details when they are due, profiles when they are asked for."""

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self.details = DetailWatch(run)
        self.profiler = Profiler(run)
        request = run.context.run.path / REQUEST_FILE
        self.requests = ProfileRequests(request, looks=dist.get_rank() == 0, stop=run.context.stop)

    def step_ends(self, result: StepResult) -> None:
        """Write what the step that has just ended gives; all ranks must call it."""
        summary = self.profiler.step_ends()
        details = self.details.end(result.expert_loads)
        metrics, at = self._run.context.metrics, self._run.position
        if metrics and details:
            metrics.write_details(at.stage, at.step, details)
            for line in describe_slow(details):
                self._run.context.display.message(line)
        if metrics and summary:
            metrics.write_profile(at.stage, at.step, summary)
            self._run.context.display.message(describe_profile(summary))


class NonFiniteGuard:
    """What happens after a step whose loss or gradient norm is not finite (training.faults)."""

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self._faults = run.context.plan.blueprint.training.faults
        self._bad_in_a_row = 0

    def judge(self, result: StepResult) -> None:
        """Skip or roll back; raises Fatal by policy, or when it happens too often."""
        if result.finite:
            self._bad_in_a_row = 0
            return
        self._bad_in_a_row += 1
        step, stage = self._run.position.step, self._run.stage.name
        what = f"step {step} of stage {stage}: loss {result.loss}, gradient norm {result.gradient_norm}"
        if self._faults.non_finite == "stop":
            raise Fatal(f"{what}; stopping, as training.faults.non_finite says")
        if self._bad_in_a_row >= self._faults.non_finite_limit:
            raise Fatal(f"{what}; {self._bad_in_a_row} bad steps in a row, the limit is that many")
        if self._faults.non_finite == "rollback":
            self._roll_back(what)
        else:
            self._run.context.display.message(f"{what}; the update is left out")

    def _roll_back(self, what: str) -> None:
        checkpointer = self._run.context.checkpointer
        checkpointer.wait()
        newest = checkpointer.newest()
        if newest is None:
            raise Fatal(f"{what}; there is no checkpoint yet to roll back to")
        folder, manifest = newest
        self._run.restore(folder, manifest, with_data=False)
        self._run.context.display.message(
            f"{what}; weights and optimizer are back at {folder.name}, data goes on behind the bad step"
        )


class _StatusWriter:
    """Keeps status.json about a second behind the truth; rank 0 only."""

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self._written = 0.0

    def write(self, force: bool = False) -> None:
        """Write where the run stands, unless it was written just now."""
        if self._run.context.metrics is None:
            return
        if force or time.monotonic() - self._written >= STATUS_SECONDS:
            at = self._run.position
            self._run.context.run.write_status(
                stage=at.stage, stage_step=at.stage_step, stage_steps=self._run.stage.steps, step=at.step
            )
            self._written = time.monotonic()
