"""Products in fp8, held against the device, the contexts and the model."""

from __future__ import annotations

from shipway.compiler.rules.report import Report
from shipway.schemas.blueprint import Blueprint

CODE = "BP406"


def check_precision(blueprint: Blueprint, report: Report) -> None:
    """Whether products can run in fp8 where the blueprint asks for it."""
    if blueprint.training.precision.compute == "fp8":
        _check_device(blueprint, report)
        _check_contexts(blueprint, report)
        _check_projections(blueprint, report)


def _check_device(blueprint: Blueprint, report: Report) -> None:
    device = blueprint.cluster.device
    if device.kind == "cuda" and device.peak.fp8 is not None:
        return
    if device.kind == "cuda":
        why = f"the device {device.name} has no products in fp8 (cluster.device.peak.fp8 is not given)"
    else:
        why = f"products in fp8 run on CUDA devices alone, and {device.name} is of kind {device.kind}"
    report.add(
        CODE,
        ("training", "precision", "compute"),
        why,
        values={("cluster", "device", "kind"): device.kind},
        legal=("bf16", "fp32"),
        help_text="Compute in bf16, or plan for devices that have them: h100, h200, h800, h20, b200, gb200.",
    )


def _check_contexts(blueprint: Blueprint, report: Report) -> None:
    from shipway.compiler.operators.fp8 import GRANULE

    for index, stage in enumerate(blueprint.training.stages):
        if stage.context % GRANULE:
            below = stage.context - stage.context % GRANULE
            report.add(
                CODE,
                ("training", "stages", index, "context"),
                f"with fp8 a context is a multiple of {GRANULE} tokens, which {stage.context} is not",
                values={("training", "precision", "compute"): "fp8"},
                legal=tuple(value for value in (below, below + GRANULE) if value),
                help_text="Products in fp8 sum over tokens, in groups of this many.",
            )


def _check_projections(blueprint: Blueprint, report: Report) -> None:
    from shipway.compiler.lower import lower
    from shipway.compiler.operators.fp8 import GRANULE, runs_in_fp8

    smallest = blueprint.training.precision.fp8_smallest
    parameters = [p for _, p in lower(blueprint.model).named_parameters()]
    if any(runs_in_fp8(p, smallest) for p in parameters):
        return
    widest = max((min(p.shape) for p in parameters if runs_in_fp8(p, GRANULE)), default=0)
    report.add(
        CODE,
        ("training", "precision", "compute"),
        f"no projection of this model is {smallest} wide, in and out, so that nothing would run in fp8",
        values={("training", "precision", "fp8_smallest"): smallest},
        legal=("bf16", "fp32"),
        help_text="Compute in bf16: it is faster for a model of this width."
        + (f" To try all the same: training.precision.fp8_smallest: {widest}." if widest else ""),
    )
