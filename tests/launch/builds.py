"""Plans and build folders for the tests of launching."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shipway.compiler.compose import compose
from shipway.compiler.emit.model import Header, render_model
from shipway.compiler.launch.files import launch_files
from shipway.compiler.launch.job import Programme, programme
from shipway.compiler.pipeline import make_plan
from shipway.compiler.validate import validate
from shipway.schemas.plan import Plan, canonical_json

TWO_NODES = (
    "cluster.nodes=2",
    "cluster.devices_per_node=1",
    "cluster.network={nics_per_node: 1, nic_bandwidth: 10Gb/s}",
)
"""The demo's two processes on two nodes."""
SHORT = (
    "training.stages.0.context=64",
    "training.stages.1.context=128",
    "training.stages.0.global_batch=256",
    "training.stages.1.global_batch=256",
    "training.stages.0.tokens=3072",  # 12 steps
    "training.stages.1.tokens=1024",  # 4 steps
    "training.checkpoints.every_steps=4",
    "training.evaluation.every_steps=1000",
)
"""Few steps of each stage."""


@cache
def planned(name: str, *overrides: str) -> Plan:
    """The plan of a blueprint with overrides."""
    composed = compose(name, overrides)
    blueprint, diagnostics = validate(composed)
    assert blueprint is not None, [d.summary for d in diagnostics]
    plan = make_plan(blueprint, composed.origin)
    assert isinstance(plan, Plan), plan
    return plan


def jobs_of(name: str, *overrides: str) -> Programme:
    """The plan as jobs."""
    return programme(planned(name, *overrides))


def built(folder: Path, name: str, *overrides: str) -> Path:
    """A build folder: what the nodes read of it."""
    plan = planned(name, *overrides)
    header = Header(plan.name, plan.shipway, plan.hash, "shipway build")
    files = {
        "plan.json": canonical_json(plan),
        "model.py": render_model(plan.blueprint.model, header=header),
        **launch_files(plan),
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
