"""The search against brute force, and its bounds against what they bound."""

from typing import Any

import numpy as np
import pytest

from shipway.compiler import bounds
from shipway.compiler.evaluate import evaluate
from shipway.compiler.evaluate_cores import least_bytes, least_seconds
from shipway.compiler.layouts import enumerate_layouts, splits
from shipway.compiler.problem import Problem
from shipway.compiler.search import FAR, SURE, exhaustive, search
from shipway.compiler.tables import tables, with_splits
from tests.compiler.planner.planning import blueprint, cluster, problem_of, rebuilt

CASES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny_pipeline": cluster(16) | {"training.stages.0.global_batch": 16384},
    "tiny_small_memory": cluster(8, memory_gib=3.0) | {"training.stages.0.global_batch": 16384},
    "llama31_8b": cluster(8) | {"training.stages.0.global_batch": 16 * 8192},
    "qwen3_30b_a3b": cluster(16, memory_gib=139.0) | {"training.stages.0.global_batch": 32 * 4096},
}


def case(name: str, objective: str = "time") -> Problem:
    source = name.removesuffix("_pipeline").removesuffix("_small_memory")
    changes = CASES[name] | {"training.objective": objective}
    return problem_of(rebuilt(blueprint(source), changes))


@pytest.mark.parametrize("objective", ["time", "cost", "memory"])
@pytest.mark.parametrize("name", CASES)
def test_the_search_finds_what_brute_force_finds(name: str, objective: str) -> None:
    made = case(name, objective)
    quick, slow = search(made), exhaustive(made)
    assert quick is not None
    assert slow is not None
    assert quick.legal == slow.legal == len(slow.candidates)
    if slow.best is None:
        assert quick.best is None
        return
    assert quick.best is not None
    for figure in ("step_seconds", "peak_bytes", "upper_bytes"):
        assert getattr(quick, figure)[quick.best] == pytest.approx(getattr(slow, figure)[slow.best], rel=1e-9)
    assert quick.candidates.layout(quick.best) == slow.candidates.layout(slow.best)
    # So are the runners-up, whichever of equals come first.
    value = "peak_bytes" if objective == "memory" else "step_seconds"
    first, true = (
        (getattr(found, value) * (found.candidates.world if objective == "cost" else 1))[found.order[:SURE]]
        for found in (quick, slow)
    )
    fits = slow.upper_bytes[slow.order[: len(true)]] <= made.capacity_bytes
    near = fits & (true <= FAR * true[0])
    assert first[: near.sum()] == pytest.approx(true[near], rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_bounds_never_exceed_what_they_bound(name: str) -> None:
    made = case(name)
    cores = enumerate_layouts(made.space, widest=True)
    shared = tables(made, cores)
    candidates, core = splits(made.space, cores)
    result = evaluate(made, candidates, with_splits(made, shared, candidates, core))
    slack = 1 + 1e-9
    for seconds, least in (
        (bounds.layout_seconds(made, cores, shared), bounds.layout_bytes(made, cores, shared)),
        (least_seconds(made, cores, shared), least_bytes(made, cores, shared)),
    ):
        # Cuts are made on rounded costs: a chunk may be that much shorter than the bound's perfect one.
        assert (seconds[core] <= result.step_seconds * slack).all()
        assert (least[core] <= result.peak_bytes * slack).all()


def test_mesh_bounds_hold_for_all_that_follows() -> None:
    made = case("tiny_pipeline")
    kept: list[int] = []

    def keep(partial: object) -> np.ndarray:
        need = bounds.mesh_bytes(made, partial)  # type: ignore[arg-type]
        kept.append(len(need))
        return need <= made.capacity_bytes

    pruned = enumerate_layouts(made.space, keep)
    everything = enumerate_layouts(made.space)
    fitting = evaluate(made, everything, tables(made, everything)).peak_bytes <= made.capacity_bytes
    survivors = evaluate(made, pruned, tables(made, pruned)).peak_bytes <= made.capacity_bytes
    assert kept
    assert fitting.sum() == survivors.sum()


@pytest.mark.parametrize("memory_gib", [30, 60, 79, 140])
def test_more_memory_never_makes_fewer_layouts_fit(memory_gib: float) -> None:
    changes = CASES["llama31_8b"]
    small = exhaustive(
        problem_of(
            rebuilt(blueprint("llama31_8b"), changes | {"cluster.device.memory": int(memory_gib * 2**30)})
        )
    )
    large = exhaustive(
        problem_of(
            rebuilt(
                blueprint("llama31_8b"), changes | {"cluster.device.memory": int((memory_gib + 10) * 2**30)}
            )
        )
    )
    assert small is not None
    assert large is not None
    assert len(large.order) >= len(small.order)


def test_more_devices_are_never_slower() -> None:
    steps = []
    for devices in (8, 16, 32):
        made = problem_of(
            rebuilt(blueprint("llama31_8b"), cluster(devices) | {"training.stages.0.global_batch": 64 * 8192})
        )
        found = search(made)
        assert found is not None
        assert found.best is not None
        steps.append(found.step_seconds[found.best])
    assert steps == sorted(steps, reverse=True)


def test_the_search_is_deterministic() -> None:
    made = case("qwen3_30b_a3b")
    first, second = search(made), search(made)
    assert first is not None
    assert second is not None
    assert first.best is not None
    assert second.best is not None
    assert first.candidates.layout(first.best) == second.candidates.layout(second.best)
    assert (first.step_seconds == second.step_seconds).all()
