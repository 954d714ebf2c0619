"""Blueprints and stages for the planner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shipway.compiler.compose import compose
from shipway.compiler.lower import lower
from shipway.compiler.problem import Problem, problem
from shipway.compiler.validate import validate
from shipway.compiler.workload import workload
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.layout import LayoutConstraints


def blueprint(name: str, *overrides: str) -> Blueprint:
    """A blueprint that comes with Shipway, with overrides."""
    made, diagnostics = validate(compose(name, overrides, None))
    assert made is not None, [d.summary for d in diagnostics]
    return made


def stage_problem(name: str, *overrides: str, stage: int = 0, pins: dict[str, Any] | None = None) -> Problem:
    """One stage of a blueprint as the planner's problem."""
    return problem_of(blueprint(name, *overrides), stage, pins)


def problem_of(made: Blueprint, stage: int = 0, pins: dict[str, Any] | None = None) -> Problem:
    """One stage of a blueprint, with parts of its layout pinned."""
    chosen = made.training.stages[stage]
    if pins is not None:
        chosen = chosen.model_copy(update={"layout": LayoutConstraints(**pins)})
    return problem(made, chosen, workload(lower(made.model)))


def rebuilt(made: Blueprint, changes: dict[str, Any]) -> Blueprint:
    """The blueprint with values at dotted paths replaced, validated anew."""
    data = made.model_dump(mode="json")
    for path, value in changes.items():
        *parents, last = path.split(".")
        place: Any = data
        for key in parents:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place[last] = value
    return Blueprint.from_data(data)


def cluster(devices: int, *, per_node: int = 8, memory_gib: float = 79.1, **network: Any) -> dict[str, Any]:
    """Overrides for a small cluster of H100-like devices."""
    nodes = max(devices // per_node, 1)
    changes: dict[str, Any] = {
        "cluster.nodes": nodes,
        "cluster.devices_per_node": min(devices, per_node),
        "cluster.link_domain": None,
        "cluster.device.memory": int(memory_gib * 2**30),
    }
    if nodes > 1:
        changes["cluster.network"] = {"nics_per_node": per_node, "nic_bandwidth": 50e9, **network}
    return changes


def names(sequence: Sequence[object]) -> list[str]:
    """Names of plan items."""
    return [str(getattr(item, "name", item)) for item in sequence]
