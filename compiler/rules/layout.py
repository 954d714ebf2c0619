"""Pinned layouts, held against what the planner says is legal, at the place where each pin is written."""

from __future__ import annotations

from shipway.compiler.documents import KeyPath
from shipway.compiler.provenance import dotted, parse_path
from shipway.compiler.rules.report import Report
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.layout import LayoutConstraints
from shipway.schemas.training import PretrainStage


def check_layouts(blueprint: Blueprint, report: Report) -> None:
    """Every reason why a pinned layout cannot be, over all stages."""
    stages = blueprint.training.stages
    pinned = [index for index, stage in enumerate(stages) if _pins(blueprint, stage)]
    if not pinned:
        return
    # The planner's arithmetic is only loaded where something is pinned.
    from shipway.compiler.infeasible import illegal
    from shipway.compiler.lower import lower
    from shipway.compiler.problem import problem
    from shipway.compiler.workload import workload

    work = workload(lower(blueprint.model))
    for index in pinned:
        for found in illegal(problem(blueprint, stages[index], work), index):
            path = written_at(blueprint, index, found.field)
            where = report.composed.provenance.location(path)
            known = report.composed.provenance.because(path, _value(blueprint, path))
            report.diagnostics.append(
                found.model_copy(
                    update={
                        "summary": f"stage {stages[index].name}: {found.summary}",
                        "field": dotted(path),
                        "where": where,
                        "because": (*found.because, *known),
                    }
                )
            )


def _pins(blueprint: Blueprint, stage: PretrainStage) -> bool:
    training = blueprint.training
    layout = stage.layout if stage.layout != "auto" else training.layout
    size = stage.micro_batch if stage.micro_batch is not None else training.micro_batch
    return layout not in ("auto", LayoutConstraints()) or size != "auto"


def written_at(blueprint: Blueprint, index: int, field: str) -> KeyPath:
    """Where the value stands that the planner calls `training.stages.N.layout.NAME`.

    A stage takes the training section's layout and micro-batch when it has none of its own.
    """
    training, stage = blueprint.training, blueprint.training.stages[index]
    path = parse_path(field)
    if path[3:4] != ("layout",):
        return path
    own = stage.layout != "auto"
    layout = stage.layout if own else training.layout
    base: KeyPath = ("training", "stages", index) if own else ("training",)
    name = path[4:]
    if name == ("micro_batch",) and getattr(layout, "micro_batch", None) is None:
        return (*(path[:3] if stage.micro_batch is not None else ("training",)), "micro_batch")
    return (*base, "layout", *name)


def _value(blueprint: Blueprint, path: KeyPath) -> object:
    value: object = blueprint
    for key in path:
        value = value[key] if isinstance(key, int) else getattr(value, key, None)  # type: ignore[index]
    return value if isinstance(value, (str, int, float)) else "pinned"
