"""Layouts that keep things in host memory: when they are offered, what they take, what refuses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shipway.compiler.assemble import choose, stage_plan
from shipway.compiler.host_memory import ACTIVATIONS, STATE
from shipway.compiler.infeasible import illegal
from shipway.compiler.memory import OPTIMIZER, STAGED_ACTIVATIONS, STAGED_STATE
from shipway.compiler.pipeline import make_plan, searched
from shipway.compiler.search import exhaustive, search
from shipway.runtime.adamw import AdamW, AdamWOptions, AdamWParameter
from shipway.schemas.capability import CAPABILITY
from shipway.schemas.plan import Plan, StagePlan
from tests.compiler.operators.generated import generated
from tests.compiler.planner.planning import blueprint, cluster, problem_of, rebuilt

GIB = 2**30
SMALL_BATCH = {"training.stages.0.global_batch": 16 * 8192}


def planned(memory_gib: float = 79.1, pins: dict[str, Any] | None = None, **changes: Any) -> StagePlan:
    made = rebuilt(blueprint("llama31_8b"), cluster(8, memory_gib=memory_gib) | SMALL_BATCH | changes)
    own = problem_of(made, pins=pins)
    found = search(own)
    assert found is not None
    assert found.best is not None
    return stage_plan(own, found)


def test_nothing_is_offloaded_where_something_fits_without() -> None:
    made = rebuilt(blueprint("llama31_8b"), cluster(8, memory_gib=30) | SMALL_BATCH)
    assert searched(problem_of(made)).offload == "none"


def test_what_does_not_fit_otherwise_is_offloaded_and_the_plan_says_so() -> None:
    made = rebuilt(blueprint("llama31_8b"), cluster(8, memory_gib=16) | SMALL_BATCH)
    made = made.model_copy(
        update={"training": made.training.model_copy(update={"stages": made.training.stages[:1]})}
    )
    plan = make_plan(made)
    assert isinstance(plan, Plan)
    (stage,) = plan.stages
    assert stage.layout.offloads_optimizer
    assert stage.memory.verdict in ("fits", "tight")
    assert any("host memory, as nothing fits" in warning for warning in plan.warnings)
    none = rebuilt(made, {"training.layout": {"offload": "none"}})
    refused = make_plan(none)
    assert isinstance(refused, list)
    assert "pinned offload" in refused[0].help


def test_state_leaves_the_device_for_the_host_and_takes_time() -> None:
    pins = {"data_parallel_shard": 8, "zero": 3, "recompute": "none", "micro_batch": 1}
    without, moved = planned(pins=pins), planned(pins=pins | {"offload": "optimizer"})
    (state,) = [item for item in without.memory.items if item.name == "optimizer state"]
    assert all(item.name != "optimizer state" for item in moved.memory.items)
    assert without.memory.host is None
    host = moved.memory.host
    assert host is not None
    assert sum(item.bytes for item in host.items) == host.node_bytes
    (kept,) = [item for item in host.items if item.name == STATE]
    assert kept.bytes == pytest.approx(8 * state.bytes, rel=1e-6), "eight devices in a node"
    copies = moved.step_seconds - without.step_seconds
    one_way = state.bytes / 64e9
    assert one_way < copies < 2 * one_way, "both ways at once, at less than the link's peak"
    freed = without.memory.ranks[0].allocated_bytes - moved.memory.ranks[0].allocated_bytes
    assert freed == pytest.approx(state.bytes, rel=1e-6), "at this peak no slice is on the device"


def test_two_slices_of_each_moment_are_on_the_device_in_the_update() -> None:
    made = rebuilt(blueprint("llama31_8b"), cluster(8) | SMALL_BATCH)
    own = problem_of(made, pins={"data_parallel_shard": 8, "offload": "optimizer"})
    found = search(own)
    assert found is not None
    assert found.best is not None
    chosen = choose(own, found.candidates.take(np.array([found.best])), found.tables_of(found.best))
    update = chosen.group.memory.moments[OPTIMIZER]
    assert update[STAGED_STATE][0, 0] == 2 * 2 * 4 * CAPABILITY.offload_slice_elements
    assert update["optimizer state"][0, 0] == 0


@pytest.mark.parametrize("offload", ["optimizer", "both"])
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_the_search_finds_what_brute_force_finds(objective: str, offload: str) -> None:
    changes = cluster(8, memory_gib=24) | SMALL_BATCH | {"training.objective": objective}
    own = problem_of(rebuilt(blueprint("llama31_8b"), changes), pins={"offload": offload})
    quick, slow = search(own), exhaustive(own)
    assert quick is not None
    assert slow is not None
    assert quick.best is not None
    assert slow.best is not None
    assert quick.legal == slow.legal == len(slow.candidates)
    assert quick.candidates.layout(quick.best) == slow.candidates.layout(slow.best)


def test_a_host_that_is_too_small_is_what_is_refused() -> None:
    made = rebuilt(
        blueprint("llama31_8b"),
        cluster(8, memory_gib=16)
        | SMALL_BATCH
        | {"cluster.host_memory": 100 * GIB, "training.layout": {"offload": "optimizer"}},
    )
    found = make_plan(made)
    assert isinstance(found, list)
    assert found[0].code == "PL001"
    assert "host memory" in found[0].summary
    assert any("cluster.host_memory" in line for line in found[0].because)


def test_the_host_is_planned_with_what_the_runtime_keeps_there() -> None:
    made = blueprint("tiny", "training.optimizer={kind: adamw}")
    own = problem_of(rebuilt(made, cluster(1)), pins={"offload": "optimizer"})
    found = search(own)
    assert found is not None
    assert found.best is not None
    host = stage_plan(own, found).memory.host
    assert host is not None
    (planned_state,) = [item.bytes for item in host.items if item.name == STATE]
    with torch.device("meta"):
        model = generated(made.model).Model()
    items = [AdamWParameter(name, torch.zeros(p.shape), True) for name, p in model.named_parameters()]
    optimizer = AdamW(items, AdamWOptions((0.9, 0.95), 1e-8, 0.1, torch.float32), torch.device("cpu"))
    kept = sum(t.nbytes for kind in (optimizer.first, optimizer.second) for t in kind.values())
    assert planned_state == kept


def test_inputs_of_layers_leave_and_are_counted_in_blocks_of_powers_of_two() -> None:
    pins = {"data_parallel_shard": 8, "zero": 3, "recompute": "full", "micro_batch": 1}
    without, moved = planned(pins=pins), planned(pins=pins | {"offload": "activations"})
    hidden = 8192 * 4096 * 2
    assert hidden == 2**26, "so that nothing is rounded here"
    host = moved.memory.host
    assert host is not None
    (kept,) = [item for item in host.items if item.name == ACTIVATIONS]
    assert kept.bytes == 8 * 32 * hidden
    (under_way,) = [item for item in moved.memory.items if item.name == STAGED_ACTIVATIONS]
    assert under_way.bytes == hidden, "the next layer's input: this one's is recomputed from"
    freed = without.memory.ranks[0].allocated_bytes - moved.memory.ranks[0].allocated_bytes
    assert freed == (32 - 2) * hidden
    assert moved.step_seconds == without.step_seconds, "64 MiB pass under a layer of 8,192 tokens"
    odd = planned(pins=pins | {"offload": "activations", "tensor_parallel": 1}, **{"model.width": 5120})
    assert odd.memory.host is not None
    (rounded,) = [item for item in odd.memory.host.items if item.name == ACTIVATIONS]
    assert rounded.bytes == 8 * 32 * 2**27, "80 MiB each"


def test_a_slow_bus_shows_in_the_step() -> None:
    pins = {"data_parallel_shard": 8, "zero": 3, "recompute": "full", "micro_batch": 1}
    slow = {"cluster.device.host_bandwidth": 10**9}
    without = planned(pins=pins, **slow)
    moved = planned(pins=pins | {"offload": "activations"}, **slow)
    (waiting,) = [item for item in moved.time if item.name == "activations to and from the host"]
    assert waiting.seconds == pytest.approx(moved.step_seconds - without.step_seconds, rel=0.02)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_activations_need_full_recomputation(recompute: str) -> None:
    own = problem_of(blueprint("llama31_8b"), pins={"offload": "both", "recompute": recompute})
    (wrong,) = illegal(own, 0)
    assert wrong.code == "BP404"
    assert wrong.field == "training.stages.0.layout.offload"
    assert wrong.legal == ("none", "optimizer")


def test_what_later_layers_read_cannot_leave() -> None:
    made = rebuilt(blueprint("tiny"), {"model.residual": {"kind": "full"}})
    (wrong,) = illegal(problem_of(made, pins={"offload": "activations"}), 0)
    assert "nothing to move" in wrong.summary
