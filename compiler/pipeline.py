"""The passes from a validated blueprint to a plan, in order, each with why it stands there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

from shipway.compiler.assemble import stage_plan
from shipway.compiler.efficiency import default_calibration
from shipway.compiler.evaluate_states import parameter_table
from shipway.compiler.frozen import frozen
from shipway.compiler.infeasible import illegal, nothing_fits
from shipway.compiler.lower import LoweredModel, lower
from shipway.compiler.offload import offloading, variants
from shipway.compiler.operators.fp8 import runs_in_fp8
from shipway.compiler.parameters import count
from shipway.compiler.plan_warnings import plan_warnings
from shipway.compiler.problem import Problem, fp8_rates, problem
from shipway.compiler.reshard import Resharding
from shipway.compiler.search import Found, merit, search
from shipway.compiler.sequence import programme
from shipway.compiler.spread import spread
from shipway.compiler.workload import workload
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.calibration import Calibration
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.layout import Offload
from shipway.schemas.plan import Parameters, Plan, StageChange, StagePlan, Totals, content_hash

Dump = Callable[[str, object], None]
"""Receives the name of each pass and what it produced."""


@frozen
class Pass:
    """One step of the compiler."""

    name: str
    reason: str


@frozen
class About:
    """What a plan says that no layout changes."""

    shipway: str
    blueprint_hash: str
    fp8_linears: tuple[str, ...]
    parameters: Parameters


@frozen
class Searched:
    """What the search of one stage came to."""

    offload: Offload
    """What its layouts keep in host memory."""
    found: Found | None
    least_offloaded_bytes: float | None = None
    """Where nothing fits: the least that a device would need with something in host memory, if tried."""
    plan: StagePlan | None = None
    """Of the best layout, which most often is the best in sequence too."""


PASSES = (
    Pass(
        "compose", "first, because every later pass needs the whole blueprint and where its values came from"
    ),
    Pass("validate", "before any arithmetic, so that what follows may assume a meaningful blueprint"),
    Pass("lower", "turns the model into operators: everything after asks the catalogue, never the blueprint"),
    Pass("fabric", "turns the cluster into links, which collectives' times need"),
    Pass("enumerate", "lists the legal layouts per stage; an illegal pin ends here, with all its reasons"),
    Pass("search", "evaluates memory and time, best promise first, and selects the best that fits"),
    Pass("sequence", "chooses the stages' layouts together, as going from one to the next takes time too"),
    Pass("assemble", "works the chosen layout out in full: budget, ledger, time, totals"),
    Pass("seal", "last: the hash covers all the rest"),
)


def make_plan(
    blueprint: Blueprint,
    origin: Sequence[str] = (),
    *,
    folder: str = "",
    calibration: Calibration | None = None,
    dump: Dump | None = None,
) -> Plan | list[Diagnostic]:
    """Plan a validated blueprint; `folder` is where its relative paths start from.

    Returns diagnostics instead when a pinned layout is impossible (codes PL0xx) or when no legal layout
    fits the devices (PL1xx), for all stages at once.
    """
    tell = dump or (lambda name, value: None)
    tell("validate", blueprint)
    lowered = lower(blueprint.model)
    work = workload(lowered)
    tell("lower", lowered)
    figures = calibration or default_calibration(blueprint.cluster.device)
    tensors = parameter_table(work, blueprint.training)
    problems = [problem(blueprint, stage, work, figures, tensors) for stage in blueprint.training.stages]
    tell("fabric", problems[0].network.fabric)
    wrong = [diagnostic for index, p in enumerate(problems) for diagnostic in illegal(p, index)]
    if wrong:
        return wrong
    tell("enumerate", [p.space for p in problems])
    about = cache(lambda: _about(blueprint, lowered))
    searches = spread(_found, problems, about)
    results: list[tuple[Problem, Found]] = []
    likely: list[StagePlan | None] = []
    for index, (p, of_stage) in enumerate(zip(problems, searches, strict=True)):
        found = of_stage.found
        if found is None or found.best is None:
            wrong += nothing_fits(p, found, index, of_stage.least_offloaded_bytes)
        else:
            results.append((offloading(p, of_stage.offload), found))
            likely.append(of_stage.plan)
    if wrong:
        return wrong
    tell("search", results)
    together = programme(results)
    tell("sequence", together.summary())
    stages = tuple(
        alone if alone is not None and found.best == chosen.best else stage_plan(p, chosen)
        for (p, found), chosen, alone in zip(results, together.found, likely, strict=True)
    )
    tell("assemble", stages)
    if not blueprint.training.data.relative_paths():
        folder = ""  # so that the same blueprint gives the same plan wherever it lies
    return _sealed(blueprint, tuple(origin), folder, figures, about(), stages, together.changes)


def _about(blueprint: Blueprint, lowered: LoweredModel) -> About:
    return About(
        shipway=shipway_version(),
        blueprint_hash=content_hash(blueprint),
        fp8_linears=fp8_linears(blueprint, lowered),
        parameters=count(blueprint.model),
    )


def _found(stage: Problem) -> Searched:
    """What the search came to, with the plan of the best layout beside it, on the same core."""
    result = searched(stage)
    if result.found is None or result.found.best is None:
        return result
    found = result.found.for_sequences(stage.capacity_bytes)
    return replace(result, found=found, plan=stage_plan(offloading(stage, result.offload), found))


def searched(stage: Problem) -> Searched:
    """The best layouts of a stage, with something kept in host memory only where nothing fits without."""
    without = search(stage)
    if without is None or without.best is not None:
        return Searched(stage.space.offload, without)
    tried = [(variant, found) for variant in variants(stage) if (found := search(variant)) is not None]
    fitting = [(variant, found) for variant, found in tried if found.best is not None]
    if not fitting:
        least = min((float(found.peak_bytes.min()) for _, found in tried), default=None)
        return Searched(stage.space.offload, without, least)
    variant, found = min(fitting, key=lambda pair: merit(*pair))
    return Searched(variant.space.offload, found)


def _sealed(
    blueprint: Blueprint,
    origin: tuple[str, ...],
    folder: str,
    figures: Calibration,
    about: About,
    stages: tuple[StagePlan, ...],
    reshardings: Sequence[Resharding],
) -> Plan:
    price = blueprint.cluster.price_per_device_hour
    changes = stage_changes(stages, reshardings, price)
    waiting_hours = sum(change.seconds for change in changes) / 3600
    device_hours = sum(change.device_seconds for change in reshardings) / 3600
    return Plan(
        shipway=about.shipway,
        name=blueprint.name,
        blueprint=blueprint,
        blueprint_hash=about.blueprint_hash,
        origin=origin,
        folder=folder,
        fp8_linears=about.fp8_linears,
        calibration=figures.name,
        parameters=about.parameters,
        stages=stages,
        changes=changes,
        totals=Totals(
            tokens=sum(stage.tokens for stage in stages),
            hours=sum(stage.hours for stage in stages) + waiting_hours,
            device_hours=sum(stage.device_hours for stage in stages) + device_hours,
            cost=sum(stage.cost for stage in stages) + sum(change.cost for change in changes),
        ),
        warnings=plan_warnings(blueprint, figures, stages),
    ).sealed()


def fp8_linears(blueprint: Blueprint, lowered: LoweredModel) -> tuple[str, ...]:
    """Modules whose products run in fp8, in the model's order."""
    rates = fp8_rates(blueprint)
    if rates is None:
        return ()
    named = lowered.named_parameters()
    return tuple(name.removesuffix(".weight") for name, p in named if runs_in_fp8(p, rates.smallest))


def stage_changes(
    stages: Sequence[StagePlan], reshardings: Sequence[Resharding], price: float
) -> tuple[StageChange, ...]:
    """What goes on between successive stages, for the plan."""
    return tuple(
        StageChange(
            before=before.name,
            after=after.name,
            state_bytes=change.state_bytes,
            read_bytes=change.read_bytes,
            write_seconds=change.write_seconds,
            read_seconds=change.read_seconds,
            restart_seconds=change.restart_seconds,
            new_job=change.new_job,
            seconds=change.seconds,
            cost=change.device_seconds / 3600 * price,
        )
        for (before, after), change in zip(pairwise(stages), reshardings, strict=True)
    )


def shipway_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("shipway")
    except PackageNotFoundError:
        return "unknown"
