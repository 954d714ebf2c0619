"""Rules across fields: what types alone cannot say. Each file holds the rules of one part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from shipway.compiler.compose import Composed
from shipway.compiler.rules.cluster import check_cluster
from shipway.compiler.rules.layout import check_layouts
from shipway.compiler.rules.model import check_model
from shipway.compiler.rules.precision import check_precision
from shipway.compiler.rules.report import Report
from shipway.compiler.rules.training import check_training, check_vocabulary
from shipway.schemas.base import Schema
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.cluster import Cluster
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.model import Model
from shipway.schemas.training import Training

Section = TypeVar("Section", bound=Schema)


def check(blueprint: Blueprint, composed: Composed) -> list[Diagnostic]:
    """All rules over a blueprint whose types are right."""
    report = Report(composed)
    check_model(blueprint.model, report)
    check_training(blueprint.training, report)
    check_cluster(blueprint.cluster, report)
    check_vocabulary(blueprint.model.vocabulary, blueprint.training, report)
    if not report.has_errors:
        check_precision(blueprint, report)
    if not report.has_errors:
        check_layouts(blueprint, report)
    return report.diagnostics


def check_sections(composed: Composed) -> list[Diagnostic]:
    """Rules of the sections whose types are right, when another section's are not."""
    report = Report(composed)
    model = _section(Model, composed, "model", check_model, report)
    training = _section(Training, composed, "training", check_training, report)
    _section(Cluster, composed, "cluster", check_cluster, report)
    if model is not None and training is not None:
        check_vocabulary(model.vocabulary, training, report)
    return report.diagnostics


def _section(
    schema: type[Section],
    composed: Composed,
    name: str,
    rules: Callable[[Any, Report], None],
    report: Report,
) -> Section | None:
    try:
        section = schema.from_data(composed.data.get(name))
    except ValidationError:
        return None
    rules(section, report)
    return section
