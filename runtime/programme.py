"""The whole training programme: stages in order, from wherever the last checkpoint stands to the end."""

from __future__ import annotations

import torch.distributed as dist

from shipway.runtime.context import Context, Position
from shipway.runtime.exit_codes import ExitCode, Fatal
from shipway.runtime.loop import train_stage
from shipway.runtime.metrics import rewind
from shipway.schemas.plan import Plan, StagePlan


def run_programme(context: Context, until: str | None = None) -> ExitCode:
    """Train every stage that is not finished; returns DONE, PREEMPTED or NO_PROGRESS, raises on failure.

    With `until`, the name of a stage, the ones after it are left to other jobs.

    Between stages, as after an interruption, all state passes through a checkpoint: the next
    stage's layout reads what the last one's wrote.
    """
    checkpointer = context.checkpointer
    start = checkpointer.newest()
    position = Position(**start[1].progress["position"]) if start else Position()
    stages = stages_left(context.plan, position, until)
    if not stages:
        return ExitCode.DONE
    if not _may_start(context, position):
        context.display.message(f"no step finished in the last starts at step {position.step}: stopping")
        return ExitCode.NO_PROGRESS
    if dist.get_rank() == 0:
        rewind(context.run.metrics, position.step)
    for stage in stages:
        outcome = train_stage(context, stage, start)
        checkpointer.wait()
        if outcome is not ExitCode.DONE:
            return outcome
        start = checkpointer.newest()
    return ExitCode.DONE


def stages_left(plan: Plan, position: Position, until: str | None = None) -> tuple[StagePlan, ...]:
    """Stages still to train up to `until`, the interrupted one first.

    Raises Fatal when the plan has no such stage.
    """
    names = [stage.name for stage in plan.stages]
    if until is not None and until not in names:
        raise Fatal(f"the plan has no stage {until!r}: it has {', '.join(names)}")
    end = names.index(until) + 1 if until is not None else len(names)
    if not position.stage:
        return plan.stages[:end]
    if position.stage not in names:
        raise Fatal(
            f"the checkpoint is of stage {position.stage!r}, the plan has {', '.join(names)}:"
            " start a new run (--new) or build the plan that wrote it"
        )
    index = names.index(position.stage)
    finished = position.stage_step >= plan.stages[index].steps
    return plan.stages[index + finished : end]


def _may_start(context: Context, position: Position) -> bool:
    """Whether starts still make progress, by rank 0's record."""
    answer = [context.run.record_start(position.step) if dist.get_rank() == 0 else True]
    dist.broadcast_object_list(answer, src=0, group=context.groups.control)
    return answer[0]
