"""Why a layout lost: it cannot be, it does not fit, or it is worse, and by which parts."""

from __future__ import annotations

from typing import Literal

import numpy as np

from shipway.compiler.assemble import choose, stage_memory, stage_plan
from shipway.compiler.describe import describe
from shipway.compiler.efficiency import default_calibration
from shipway.compiler.frozen import frozen
from shipway.compiler.infeasible import GIB, illegal, nothing_fits
from shipway.compiler.lower import lower
from shipway.compiler.problem import Problem, problem
from shipway.compiler.search import Found, search
from shipway.compiler.workload import workload
from shipway.schemas.calibration import Calibration
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.layout import Layout, LayoutConstraints
from shipway.schemas.plan import Plan, StageMemory, StagePlan

Outcome = Literal["illegal", "does not fit", "worse", "as good"]


@frozen
class Difference:
    """One part of the step or of the memory, in the asked layout and in the chosen one."""

    name: str
    asked: float
    chosen: float

    @property
    def lost(self) -> float:
        """What the asked layout takes more."""
        return self.asked - self.chosen


@frozen
class Answer:
    """Why a layout was not chosen for one stage."""

    stage: str
    outcome: Outcome
    reasons: tuple[Diagnostic, ...]
    """Why it cannot be or does not fit; empty when it would run."""
    layout: Layout | None
    """The best layout that meets what was asked, or the least demanding where none fits; None when none is
    legal."""
    step: tuple[Difference, ...] = ()
    """Seconds of the step, the whole step first, then its parts, the largest loss first; empty unless it
    would run."""
    memory: tuple[Difference, ...] = ()
    """Bytes of the worst rank, likewise; empty where none is legal."""
    capacity_bytes: int = 0
    cost: Difference | None = None
    """Dollars of the stage."""
    objective: str = "time"

    def sentence(self) -> str:
        """The answer in one line."""
        match self.outcome:
            case "illegal":
                text = self.reasons[0].summary
            case "does not fit":
                text = self._misses()
            case "worse":
                text = self._loses()
            case "as good":
                assert self.layout is not None
                text = f"{describe(self.layout)} is what the plan has, or as good"
        return f"stage {self.stage}: {text}"

    def _misses(self) -> str:
        assert self.layout is not None
        needs, has = self.memory[0].asked, self.capacity_bytes
        largest = max(self.memory[1:], key=lambda part: part.asked)
        text = (
            f"{describe(self.layout)} does not fit: it needs {needs / GIB:,.1f} GiB,"
            f" {(needs - has) / GIB:,.1f} GiB more than the device has;"
            f" {largest.name} alone take {largest.asked / GIB:,.1f} GiB"
        )
        grown = self.memory[1]
        if grown.lost <= 0:
            return text
        more = f"{grown.lost / GIB:,.1f} GiB more than in the plan"
        return f"{text}, {more}" if grown is largest else f"{text}, and {grown.name} {more}"

    def _loses(self) -> str:
        assert self.layout is not None
        whole, largest = self.step[0], self.step[1]
        slower = f"{100 * (whole.asked / whole.chosen - 1):.1f} % slower"
        parts = f"most of all by {largest.name} ({largest.asked:.2f} s in place of {largest.chosen:.2f} s)"
        if self.objective == "cost" and self.cost is not None and self.cost.chosen:
            dearer = f"{100 * (self.cost.asked / self.cost.chosen - 1):.1f} % dearer"
            return f"{describe(self.layout)} is {dearer}; the step loses {parts}"
        if self.objective == "memory":
            return f"{describe(self.layout)} needs {self.memory[0].lost / GIB:,.1f} GiB more"
        return f"{describe(self.layout)} is {slower}, {parts}"


def why(plan: Plan, asked: LayoutConstraints, calibration: Calibration | None = None) -> tuple[Answer, ...]:
    """For each stage of a plan, why it does not have the layout that is asked about.

    `calibration` must be what the plan was made with; by default the device's own figures.
    """
    figures = calibration or default_calibration(plan.blueprint.cluster.device)
    return tuple(_answer(plan, index, asked, figures) for index in range(len(plan.stages)))


def _answer(plan: Plan, index: int, asked: LayoutConstraints, figures: Calibration) -> Answer:
    blueprint, chosen = plan.blueprint, plan.stages[index]
    stage = blueprint.training.stages[index].model_copy(update={"layout": asked, "micro_batch": None})
    own = problem(blueprint, stage, workload(lower(blueprint.model)), figures)
    reasons = illegal(own, index)
    found = None if reasons else search(own)
    if found is None or not len(found.candidates):
        reasons = reasons or nothing_fits(own, found, index)
        return Answer(chosen.name, "illegal", tuple(reasons), None)
    if found.best is None:
        return _unfit(own, found, index, chosen)
    return _compared(chosen, stage_plan(own, found), blueprint.training.objective, own.capacity_bytes)


def _unfit(own: Problem, found: Found, index: int, chosen: StagePlan) -> Answer:
    nearest = int(np.argmin(found.peak_bytes))
    other = choose(own, found.candidates.take(np.array([nearest])), found.tables_of(nearest))
    return Answer(
        chosen.name,
        "does not fit",
        tuple(nothing_fits(own, found, index)),
        found.candidates.layout(nearest, offload=own.space.offload),
        memory=_memory(stage_memory(other), chosen.memory),
        capacity_bytes=own.capacity_bytes,
    )


def _compared(chosen: StagePlan, other: StagePlan, objective: str, capacity: int) -> Answer:
    seconds = [{item.name: item.seconds for item in plan.time} for plan in (other, chosen)]
    step = Difference("the whole step", other.step_seconds, chosen.step_seconds)
    memory = _memory(other.memory, chosen.memory)
    cost = Difference("cost", other.cost, chosen.cost)
    lost = {"time": step, "cost": cost, "memory": memory[0]}[objective].lost
    return Answer(
        chosen.name,
        "worse" if lost > 0 else "as good",
        (),
        other.layout,
        (step, *_parts(*seconds)),
        memory,
        capacity,
        cost,
        objective,
    )


def _memory(asked: StageMemory, chosen: StageMemory) -> tuple[Difference, ...]:
    sizes = [{item.name: float(item.bytes) for item in memory.items} for memory in (asked, chosen)]
    peak = Difference("the whole peak", float(asked.peak_bytes), float(chosen.peak_bytes))
    return (peak, *_parts(*sizes))


def _parts(asked: dict[str, float], chosen: dict[str, float]) -> list[Difference]:
    names = dict.fromkeys([*asked, *chosen])
    parts = [Difference(name, asked.get(name, 0.0), chosen.get(name, 0.0)) for name in names]
    return sorted(parts, key=lambda part: -part.lost)
