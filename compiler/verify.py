"""What was measured beside what was planned, term by term."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from shipway.compiler.frozen import frozen
from shipway.compiler.step_time import CHECKPOINTS, OPTIMIZER_TIME
from shipway.compiler.timing import CATEGORIES
from shipway.schemas.plan import MemoryBudget, StagePlan
from shipway.schemas.verification import RankMemory, StageReading

Unit = Literal["bytes", "seconds"]
ALLOCATED, RESERVED, OUTSIDE = "allocated", "reserved", "outside the allocator"
STEP = "step"
KEPT, GATHERED = "kept activations", "gathered parameters"
REST = "rest: data, checkpoints, waiting between phases"
"""Of a step, what neither phase holds."""
LEFT_BY_FORWARD = f"{KEPT} and {GATHERED}"
"""What a forward leaves allocated holds both, where FSDP does not gather again."""


@frozen
class Term:
    """One figure of a plan and its measurement."""

    name: str
    unit: Unit
    planned: float
    measured: float

    @property
    def excess(self) -> float:
        """Of the plan over the measurement: negative when the plan is under the truth."""
        return self.planned - self.measured

    @property
    def error(self) -> float:
        """Of the plan, relative to the measurement: negative when the plan is under the truth."""
        return self.excess / self.measured if self.measured else 0.0

    def data(self) -> dict[str, object]:
        """For JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "planned": self.planned,
            "measured": self.measured,
            "error": self.error,
        }


@frozen
class Comparison:
    """A stage's reading beside its plan."""

    reading: StageReading
    verdict: str
    """The plan's, of the worst rank."""
    totals: tuple[Term, ...]
    """Allocated, reserved and outside memory of the rank that is furthest off, and the step."""
    parts: tuple[Term, ...]
    """What the totals are made of, as far as it can be told apart."""

    def total(self, name: str) -> Term | None:
        """One of the totals."""
        return next((term for term in self.totals if term.name == name), None)

    def culprit(self, unit: Unit) -> Term | None:
        """The part that is off by the largest amount in the direction of its total; None without any."""
        total = self.total(ALLOCATED if unit == "bytes" else STEP)
        if total is None:
            return None
        sign = math.copysign(1, total.error)
        parts = [part for part in self.parts if part.unit == unit and part.excess * sign > 0]
        return max(parts, key=lambda part: abs(part.excess), default=None)

    @property
    def false_fit(self) -> bool:
        """Whether it was said to fit and ran out of memory."""
        return self.reading.outcome == "out of memory" and self.verdict == "fits"


def compare(stage: StagePlan, reading: StageReading) -> Comparison:
    """Terms of one measured stage; without any when it was not measured."""
    if reading.outcome != "measured":
        return Comparison(reading, stage.memory.verdict, (), ())
    totals, parts = _memory(stage, reading)
    time = Term(STEP, "seconds", stage.step_seconds, reading.step_seconds)
    return Comparison(
        reading,
        stage.memory.verdict,
        (*totals, time),
        (*parts, *_phases(stage, reading), *_kernels(stage, reading)),
    )


def _memory(stage: StagePlan, reading: StageReading) -> tuple[list[Term], list[Term]]:
    """Totals and parts of the rank whose allocated memory is furthest from its budget."""
    measured = [rank for rank in reading.ranks if rank.allocated_bytes]
    if not measured:
        return [], []
    pairs = [(stage.memory.of(rank.pipeline_rank), rank) for rank in measured]
    budget, rank = max(pairs, key=lambda pair: abs(pair[0].allocated_bytes / pair[1].allocated_bytes - 1))
    totals = [
        Term(ALLOCATED, "bytes", budget.allocated_bytes, rank.allocated_bytes),
        Term(RESERVED, "bytes", budget.reserved_bytes, rank.reserved_bytes),
        Term(OUTSIDE, "bytes", budget.outside_bytes, rank.outside_bytes),
    ]
    return totals, _memory_parts(budget, rank)


def _memory_parts(budget: MemoryBudget, rank: RankMemory) -> list[Term]:
    planned: dict[str, float] = {}
    for item in budget.items:
        planned[item.category] = planned.get(item.category, 0.0) + item.bytes
    items = {item.name: item.bytes for item in budget.items}
    gathered = items.get(GATHERED, 0)
    kept = items.get(KEPT, 0) + gathered
    held = rank.parameter_bytes + rank.optimizer_bytes
    parts = [
        Term("parameters", "bytes", planned.get("parameters", 0.0) - gathered, rank.parameter_bytes),
        Term("optimizer", "bytes", planned.get("optimizer", 0.0), rank.optimizer_bytes),
    ]
    both = kept and rank.kept_bytes
    parts += [Term(LEFT_BY_FORWARD, "bytes", kept, rank.kept_bytes)] if both else []
    rest = budget.allocated_bytes - sum(term.planned for term in parts)
    measured = rank.allocated_bytes - held - (rank.kept_bytes if both else 0)
    return [*parts, Term("gradients, communication and scratch", "bytes", rest, max(0, measured))]


def _phases(stage: StagePlan, reading: StageReading) -> list[Term]:
    update = sum(item.seconds for item in stage.time if item.name == OPTIMIZER_TIME)
    spread = sum(item.seconds for item in stage.time if item.name == CHECKPOINTS)
    planned = {"forward and backward": stage.step_seconds - update - spread, "update": update}
    phases = [
        Term(name, "seconds", planned[name], seconds)
        for name, seconds in reading.phase_seconds.items()
        if name in planned
    ]
    if len(phases) < len(planned):
        return phases
    measured = reading.step_seconds - sum(phase.measured for phase in phases)
    return [*phases, Term(REST, "seconds", spread, max(0.0, measured))]


def _kernels(stage: StagePlan, reading: StageReading) -> list[Term]:
    """Compute by category, and communication by axis.

    Under a pipeline a plan lists the critical path's compute, which no rank's kernels add up to.
    """
    terms = []
    if stage.layout.pipeline_parallel == 1 and reading.kernel_seconds:
        planned = {item.name: item.seconds for item in stage.time}
        terms += [
            Term(name, "seconds", planned.get(name, 0.0), reading.kernel_seconds.get(name, 0.0))
            for name in CATEGORIES
            if name in planned or name in reading.kernel_seconds
        ]
    axes: dict[str, float] = {}
    for line in stage.communication:
        axes[line.axis] = axes.get(line.axis, 0.0) + line.seconds
    terms += [
        Term(f"communication over {axis}", "seconds", axes.get(axis, 0.0), seconds)
        for axis, seconds in sorted(reading.communication_seconds.items())
    ]
    return terms


@frozen
class Spread:
    """How far one total is off over a campaign; relative errors, signed ones as Term.error."""

    name: str
    cases: int
    median: float
    """Of the absolute errors."""
    worst: float
    """The largest absolute error."""
    most_under: float
    """How far a plan was under the truth, at worst; 0 when none was."""


def spreads(comparisons: Iterable[Comparison]) -> list[Spread]:
    """The error distribution of each total over what could be measured."""
    comparisons = list(comparisons)
    found = []
    for name in (ALLOCATED, RESERVED, STEP):
        errors = [term.error for c in comparisons if (term := c.total(name)) is not None]
        if errors:
            found.append(_spread(name, errors))
    return found


def _spread(name: str, errors: Sequence[float]) -> Spread:
    sizes = [abs(error) for error in errors]
    return Spread(name, len(errors), statistics.median(sizes), max(sizes), max(0.0, -min(errors)))
