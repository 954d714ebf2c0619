"""Random valid blueprints to hold plans against devices: architectures, sizes, contexts, recomputation.

A draw is a blueprint as a user would write it, so that any of them can be looked at, planned and run again.
Everything comes from one seed.
"""

from __future__ import annotations

import random
from typing import Any

from shipway.compiler.frozen import frozen
from shipway.compiler.pipeline import make_plan
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.calibration import Calibration
from shipway.schemas.cluster import Cluster
from shipway.schemas.plan import Plan

TRIES = 40
"""Draws that may be too large, too slow or not plannable before one is given up."""
LONGEST_STEP_SECONDS = 1.5
"""A measurement takes a dozen steps, and a campaign many measurements."""
AXES = (
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "data_parallel_replicate",
)
"""Of a layout, what draws for several devices pin in turns."""
MIXES = (
    ("delta", "delta", "delta", "latent"),
    ("latent",),
    ("grouped",),
    ("delta", "grouped"),
    ("delta",),
)
"""Attention patterns."""
NEAR_LIMIT = (0.88, 1.0)
"""Share of the device that a plan near the card's limit peaks at."""


@frozen
class Draw:
    """One drawn blueprint and its plan."""

    number: int
    blueprint: dict[str, Any]
    """What a blueprint file holds, but for the cluster."""
    plan: Plan


def draw(
    seed: int, number: int, cluster: Cluster, near_limit: bool, figures: Calibration | None
) -> Draw | None:
    """The draw of this number: the same for the same arguments; None when nothing plannable was found."""
    rng = random.Random(f"{seed}/{number}/{near_limit}")
    for _ in range(TRIES):
        data = _blueprint(rng, number, cluster.devices)
        found = _sized(rng, data, cluster, near_limit, figures)
        if found is not None:
            return Draw(number, *found)
    return None


def _sized(
    rng: random.Random, data: dict[str, Any], cluster: Cluster, near_limit: bool, figures: Calibration | None
) -> tuple[dict[str, Any], Plan] | None:
    """`data` with as many layers as the share of the device that is aimed at allows, and its plan."""
    target = rng.uniform(*NEAR_LIMIT) if near_limit else rng.uniform(0.08, 0.85)
    model, best = data["model"], None
    for _ in range(6):
        plan = _planned(data, cluster, figures)
        if plan is None:
            share = 2.0  # too large to fit, for all that is known
        else:
            worst = plan.stages[0].memory.ranks
            share = max(b.peak_bytes / b.capacity_bytes for b in worst)
            if plan.stages[0].step_seconds > LONGEST_STEP_SECONDS:
                return best
            inside = NEAR_LIMIT[0] <= share <= NEAR_LIMIT[1] if near_limit else share <= 1
            best = (_copy(data), plan) if inside else best
        period = len(model["attention"]["mix"]["pattern"])
        wanted = model["layers"] * min(2.0, max(0.4, target / share))
        layers = period * max(1, min(64 // period, round(wanted / period)))
        if layers == model["layers"]:
            break
        model["layers"] = layers
    return best


def _copy(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "model": dict(data["model"])}


def _planned(data: dict[str, Any], cluster: Cluster, figures: Calibration | None) -> Plan | None:
    blueprint = Blueprint.from_data({**data, "cluster": cluster.model_dump(mode="json")})
    plan = make_plan(blueprint, calibration=figures)
    return None if isinstance(plan, list) else plan


def _blueprint(rng: random.Random, number: int, devices: int) -> dict[str, Any]:
    width = rng.choice((1024, 1536, 2048, 3072, 4096))
    context = rng.choice((2048, 4096, 8192, 16384, 32768))
    rows = rng.choice((1, 1, 2, 4)) if context > 8192 else rng.choice((1, 2, 4, 8))
    steps = rng.choice((1, 1, 2))
    stage: dict[str, Any] = {
        "name": "drawn",
        "context": context,
        "tokens": context * rows * steps * devices * 100,
        "global_batch": context * rows * steps * devices,
        "learning_rate": {"kind": "constant", "peak": 1e-4},
        "layout": {"recompute": rng.choice(("none", "none", "selective", "full"))},
    }
    if devices == 1:
        stage["layout"]["micro_batch"] = rows
    else:
        stage["layout"] |= rng.choice(_pins(devices))
    return {
        "name": f"draw_{number:03d}",
        "model": _model(rng, width),
        "training": {
            "stages": [stage],
            "optimizer": {"kind": rng.choice(("muon", "muon", "adamw"))},
            "precision": {"compute": "bf16"},
            "checkpoints": {"every_steps": 1000},
            "evaluation": {"every_steps": 1000},
        },
    }


def _pins(devices: int) -> list[dict[str, int]]:
    """Constraints that bring every axis into some draws; in the first one the planner is free."""
    return [{}, *({axis: size} for axis in AXES for size in (2, 4, 8) if size <= devices)]


def _model(rng: random.Random, width: int) -> dict[str, Any]:
    heads = width // 128
    kinds = rng.choice(MIXES)
    attention: dict[str, Any] = {"mix": {"pattern": list(kinds)}}
    if "delta" in kinds:
        bounded = rng.random() < 0.75
        decay = {"kind": "bounded", "minimum": -5.0} if bounded else {"kind": "unbounded"}
        attention["delta"] = {"heads": heads, "decay": decay, "output_gate": rng.choice(("full", "low_rank"))}
    if "latent" in kinds:
        attention["latent"] = {
            "heads": heads,
            "query_rank": rng.choice((None, 512, 768)),
            "kv_rank": 512,
            "position": rng.choice(({"kind": "none"}, {"kind": "rotary"})),
            "output_gate": rng.choice(("none", "elementwise")),
        }
    if "grouped" in kinds:
        attention["grouped"] = {"heads": heads, "kv_heads": heads // rng.choice((1, 2, 4)), "head_width": 128}
    return {
        "vocabulary": rng.choice((32768, 65536, 131072)),
        "width": width,
        "layers": rng.choice((4, 8, 12, 16)),
        "attention": attention,
        "feed_forward": _feed_forward(rng, width),
        "residual": rng.choice(({"kind": "plain"}, {"kind": "block", "block_layers": rng.choice((2, 4, 6))})),
        "tied_embeddings": rng.random() < 0.25,
    }


def _feed_forward(rng: random.Random, width: int) -> dict[str, Any]:
    activation = {"kind": rng.choice(("situ", "swiglu"))}
    dense = width * rng.choice((3, 4))
    if rng.random() < 0.35:
        return {"mix": {"pattern": ["dense"]}, "dense_inner_width": dense, "activation": activation}
    routed = rng.choice((8, 16, 32, 64))
    experts = {
        "routed": routed,
        "active": rng.choice((2, 4, 8 if routed > 8 else 4)),
        "inner_width": rng.choice((512, 768, 1024)),
        "latent_width": rng.choice((None, width // 2)),
        "shared": rng.choice((0, 1, 2)),
        "balancing": {"kind": rng.choice(("quantile", "bias"))},
    }
    return {
        "mix": {"head": ["dense"], "pattern": ["experts"]},
        "dense_inner_width": dense,
        "experts": experts,
        "activation": activation,
    }
