"""Why a layout lost: it cannot be, it does not fit, or it takes longer, and by which parts."""

from __future__ import annotations

from dataclasses import dataclass

from shipway.compiler.assemble import stage_plan
from shipway.compiler.efficiency import default_calibration
from shipway.compiler.infeasible import describe, illegal, nothing_fits
from shipway.compiler.lower import lower
from shipway.compiler.problem import problem
from shipway.compiler.search import search
from shipway.compiler.workload import workload
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.layout import Layout, LayoutConstraints
from shipway.schemas.plan import Plan, StagePlan


@dataclass(frozen=True)
class Difference:
    """One part of the step or of the memory, in the asked layout and in the chosen one."""

    name: str
    asked: float
    chosen: float


@dataclass(frozen=True)
class Answer:
    """Why a layout was not chosen for one stage."""

    stage: str
    reasons: tuple[Diagnostic, ...]
    """Why it cannot be or does not fit; empty when it would run."""
    layout: Layout | None
    """The best layout that meets what was asked; None when there is none."""
    step: tuple[Difference, ...]
    """Seconds of the step, the largest loss first; the whole step first of all."""
    memory: tuple[Difference, ...]
    """Bytes of the worst rank, likewise."""

    def sentence(self) -> str:
        """The answer in one line."""
        if self.layout is None:
            return f"stage {self.stage}: {self.reasons[0].summary}"
        whole, largest = self.step[0], self.step[1]
        if whole.asked <= whole.chosen:
            return f"stage {self.stage}: {describe(self.layout)} is what the plan has, or as fast"
        slower = 100 * (whole.asked / whole.chosen - 1)
        return (
            f"stage {self.stage}: {describe(self.layout)} is {slower:.1f} % slower,"
            f" most of all by {largest.name} ({largest.asked:.2f} s in place of {largest.chosen:.2f} s)"
        )


def why(plan: Plan, asked: LayoutConstraints) -> tuple[Answer, ...]:
    """For each stage of a plan, why it does not have the layout that is asked about."""
    return tuple(_answer(plan, index, asked) for index in range(len(plan.stages)))


def _answer(plan: Plan, index: int, asked: LayoutConstraints) -> Answer:
    blueprint, chosen = plan.blueprint, plan.stages[index]
    stage = blueprint.training.stages[index].model_copy(update={"layout": asked, "micro_batch": None})
    figures = default_calibration(blueprint.cluster.device)
    own = problem(blueprint, stage, workload(lower(blueprint.model)), figures)
    reasons = illegal(own, index)
    if reasons:
        return Answer(chosen.name, tuple(reasons), None, (), ())
    found = search(own)
    if found is None or found.best is None:
        return Answer(chosen.name, tuple(nothing_fits(own, found, index)), None, (), ())
    return _compared(chosen, stage_plan(own, found))


def _compared(chosen: StagePlan, other: StagePlan) -> Answer:
    seconds = [{item.name: item.seconds for item in plan.time} for plan in (other, chosen)]
    sizes = [{item.name: float(item.bytes) for item in plan.memory.items} for plan in (other, chosen)]
    step = Difference("the whole step", other.step_seconds, chosen.step_seconds)
    peak = Difference("the whole peak", float(other.memory.peak_bytes), float(chosen.memory.peak_bytes))
    return Answer(chosen.name, (), other.layout, (step, *_parts(*seconds)), (peak, *_parts(*sizes)))


def _parts(asked: dict[str, float], chosen: dict[str, float]) -> list[Difference]:
    names = dict.fromkeys([*asked, *chosen])
    parts = [Difference(name, asked.get(name, 0.0), chosen.get(name, 0.0)) for name in names]
    return sorted(parts, key=lambda part: part.chosen - part.asked)
