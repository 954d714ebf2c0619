"""Plans and build folders of a small generated model: what the runtime reads of them is real."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from shipway.compiler.emit.model import render_model
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.layout import Layout
from shipway.schemas.plan import (
    MemoryBudget,
    MemoryItem,
    Parameters,
    Plan,
    StageMemory,
    StagePlan,
    Totals,
    canonical_json,
)
from tests.templates.generated import HEADER, HYBRID

CONTEXT_TOKENS = 32


def small_blueprint(stages: dict[str, int], sequences: int, layers: int = 5, **training: Any) -> Blueprint:
    """A blueprint whose `stages` maps names to numbers of steps."""
    blueprint = {
        "name": "small",
        "model": {**copy.deepcopy(HYBRID), "vocabulary": 272, "layers": layers},
        "training": {
            "stages": [
                {
                    "name": name,
                    "context": CONTEXT_TOKENS * (index + 1),
                    "tokens": steps * sequences * CONTEXT_TOKENS * (index + 1),
                    "global_batch": sequences * CONTEXT_TOKENS * (index + 1),
                    "learning_rate": {"kind": "cosine", "peak": 0.01, "warmup": 0.2},
                }
                for index, (name, steps) in enumerate(stages.items())
            ],
            "precision": {"compute": "fp32"},
            **training,
        },
        "cluster": {
            "name": "cpu",
            "nodes": 1,
            "devices_per_node": 2,
            "device": {
                "name": "cpu",
                "kind": "cpu",
                "memory": "8GB",
                "memory_bandwidth": "20GB/s",
                "peak": {"bf16": "50GFLOP/s", "fp32": "50GFLOP/s"},
                "link_bandwidth": "5GB/s",
                "host_bandwidth": "5GB/s",
                "source": "made up for tests",
            },
        },
    }
    return Blueprint.from_data(blueprint)


def small_plan(
    stages: dict[str, int], layouts: list[Layout], sequences: int = 8, layers: int = 5, **training: Any
) -> Plan:
    """A sealed plan; `layouts` are those of the stages, in order."""
    blueprint = small_blueprint(stages, sequences, layers, **training)
    entries = zip(blueprint.training.stages, layouts, strict=True)
    return Plan(
        shipway="0",
        name="small",
        blueprint=blueprint,
        blueprint_hash="",
        calibration="none",
        parameters=Parameters(total=0, active=0, active_with_embedding=0, active_without_head=0, blocks=()),
        stages=tuple(
            _stage(stage.name, stage.context, stage.steps, sequences, layout) for stage, layout in entries
        ),
        totals=Totals(tokens=0, hours=0, device_hours=0, cost=0),
    ).sealed()


def write_build(plan: Plan, folder: Path) -> Path:
    """A build folder with the plan and the generated model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(canonical_json(plan))
    (folder / "model.py").write_text(render_model(plan.blueprint.model, header=HEADER))
    return folder


def _stage(name: str, context: int, steps: int, sequences: int, layout: Layout) -> StagePlan:
    item = MemoryItem(name="weights", category="parameters", bytes=2**20)
    budget = MemoryBudget(
        rank="pipeline rank 0",
        pipeline_rank=0,
        items=(item,),
        allocated_bytes=2**20,
        reserved_bytes=2**20,
        outside_bytes=0,
        peak_bytes=2**20,
        upper_bytes=2**20,
        capacity_bytes=8 * 10**9,
        moment="the last layer's backward",
        verdict="fits",
    )
    return StagePlan(
        name=name,
        context_tokens=context,
        tokens=steps * sequences * context,
        steps=steps,
        sequences_per_step=sequences,
        layout=layout,
        devices_used=layout.world_size,
        memory=StageMemory(peak_bytes=2**20, items=(item,), verdict="fits", ranks=(budget,)),
        communication=(),
        time=(),
        step_seconds=0.1,
        tokens_per_second=1e4,
        model_flops_per_token=1e5,
        mfu=0.1,
        hfu=0.1,
        hours=0.1,
        device_hours=0.1,
        cost=0.0,
        candidates=1,
        alternatives=(),
    )
