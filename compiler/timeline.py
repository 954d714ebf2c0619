"""The predicted step of a planned stage in time: every pass of every rank, and what follows the passes.

Worked out anew from the plan's blueprint and layout, by the same cost model that chose it.
"""

from __future__ import annotations

import numpy as np

from shipway.compiler.assemble import choose
from shipway.compiler.efficiency import default_calibration
from shipway.compiler.evaluate import AXIS_TIME
from shipway.compiler.evaluate_parts import AXES
from shipway.compiler.frozen import frozen
from shipway.compiler.layouts import from_layout
from shipway.compiler.ledger import Chosen
from shipway.compiler.lower import lower
from shipway.compiler.offload import offloading
from shipway.compiler.problem import Problem, problem
from shipway.compiler.schedule import Slot, simulate
from shipway.compiler.step_time import PASSES, TIMES, deferred_seconds, send_seconds
from shipway.compiler.workload import workload
from shipway.schemas.calibration import Calibration
from shipway.schemas.plan import Plan, StagePlan


@frozen
class Timeline:
    """One optimizer step; times are seconds from its start."""

    slots: tuple[Slot, ...]
    """Passes of all pipeline ranks."""
    stretch: float
    """Factor from the simulated schedule to the planner's closed form of its length."""
    passes_seconds: float
    """Length of all passes: the end of the last slot."""
    after: tuple[tuple[str, float], ...]
    """What follows the passes on every rank, in order, with its seconds."""
    collectives: dict[str, tuple[tuple[str, float], ...]]
    """For a slot's kind, `F`, `B` or `I`, and chunk, as `F3`: collectives inside it with their seconds."""
    send_seconds: float
    """Passing hidden states to the next pipeline rank."""

    @property
    def step_seconds(self) -> float:
        """Length of the step."""
        return self.passes_seconds + sum(seconds for _, seconds in self.after)


def timelines(plan: Plan, calibration: Calibration | None = None) -> tuple[Timeline, ...]:
    """A timeline for each stage; `calibration` must be the one that the plan was made with."""
    figures = calibration or default_calibration(plan.blueprint.cluster.device)
    work = workload(lower(plan.blueprint.model))
    stages = zip(plan.blueprint.training.stages, plan.stages, strict=True)
    return tuple(
        timeline_of(problem(plan.blueprint, stage, work, figures), planned) for stage, planned in stages
    )


def timeline_of(stage_problem: Problem, planned: StagePlan) -> Timeline:
    """The timeline of one planned stage."""
    layout = planned.layout
    stage_problem = offloading(stage_problem, layout.offload)
    chosen = choose(stage_problem, from_layout(layout))
    group, chunked = chosen.group, chosen.group.chunked
    forward, backward = chunked.cells("forward"), chunked.cells("backward")
    deferred = deferred_seconds(chunked, backward) if chunked.is_v_shaped else np.zeros_like(backward)
    order = chunked.order
    send = float(send_seconds(stage_problem, chunked)[0])
    pp, virtual = group.pp, group.chunks // group.pp
    simulated = simulate(
        pp,
        virtual,
        layout.micro_batches,
        forward[0, order].tolist(),
        backward[0, order].tolist(),
        send,
        schedule=layout.schedule,
        deferred_seconds=deferred[0, order].tolist(),
    )
    end = max(slot.end_seconds for slot in simulated)
    passes = float(group.time[PASSES][0])
    stretch = passes / end
    slots = tuple(
        Slot(slot.rank, slot.action, slot.start_seconds * stretch, slot.end_seconds * stretch)
        for slot in simulated
    )
    after = tuple((name, float(group.time[name][0])) for name in TIMES if name in group.time)
    return Timeline(
        slots=slots,
        stretch=stretch,
        passes_seconds=passes,
        after=tuple((name, seconds) for name, seconds in after if seconds > 0),
        collectives=_collectives(chosen, stretch),
        send_seconds=send * stretch,
    )


def _collectives(chosen: Chosen, stretch: float) -> dict[str, tuple[tuple[str, float], ...]]:
    """Sums over the layers of each chunk, by axis and direction, without what recomputation repeats."""
    rows = chosen.group.chunked.counts[0, chosen.group.chunked.order]
    cell = int(chosen.shared.cell_of[0])
    transfer = chosen.shared.parts.transfer[..., cell]
    found: dict[str, tuple[tuple[str, float], ...]] = {}
    for phase, kind in ((0, "F"), (1, "B"), (1, "I")):
        per_chunk = np.einsum("ar,cr->ca", transfer[phase], rows) * stretch
        for chunk, seconds in enumerate(per_chunk.tolist()):
            named = zip(AXES, seconds, strict=True)
            found[f"{kind}{chunk}"] = tuple((AXIS_TIME[axis], time) for axis, time in named if time > 0)
    return found
