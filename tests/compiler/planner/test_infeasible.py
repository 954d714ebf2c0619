"""Pins that cannot be and stages that do not fit: the reason, and the way out."""

from typing import Any

import pytest

from shipway.compiler.infeasible import illegal
from shipway.compiler.pipeline import make_plan
from shipway.compiler.problem import Problem
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.plan import Plan
from tests.compiler.planner.planning import blueprint, cluster, problem_of, rebuilt, stage_problem


def pinned(name: str, **pins: Any) -> Problem:
    return stage_problem(name, pins=pins)


def only(found: list[Diagnostic]) -> Diagnostic:
    assert len(found) == 1, [d.summary for d in found]
    return found[0]


def refused(changes: dict[str, Any], name: str = "llama31_8b") -> list[Diagnostic]:
    made = make_plan(rebuilt(blueprint(name), changes))
    assert isinstance(made, list)
    return made


def test_tensor_parallel_beyond_the_heads_is_refused_with_the_legal_degrees() -> None:
    # torchtitan#2574, #932: died in a reshape.
    found = only(illegal(pinned("llama31_8b", tensor_parallel=16), 0))
    assert found.code == "BP402"
    assert "key-value heads" in found.summary
    assert found.legal[0] == "8"
    assert found.field == "training.stages.0.layout.tensor_parallel"


def test_expert_parallel_that_divides_nothing_is_refused() -> None:
    # torchtitan#4258: a zero-sized mesh later.
    found = only(illegal(pinned("qwen3_30b_a3b", expert_parallel=48), 0))
    assert "routed experts (128)" in found.summary
    assert found.legal[0] in ("32", "64")


def test_a_dense_model_has_no_experts_to_spread() -> None:
    found = only(illegal(pinned("llama31_8b", expert_parallel=8), 0))
    assert "no routed experts" in found.summary
    assert found.legal == ("1",)


def test_context_parallel_needs_whole_slices() -> None:
    # torchtitan#1306, #1312: sequence not divisible by TP, or by 2 CP.
    found = only(illegal(pinned("llama31_8b", context_parallel=3), 0))
    assert "twice it must divide the context (8192)" in found.summary
    assert "4" in found.legal


def test_all_mistakes_are_told_at_once() -> None:
    # vllm#52435: one constraint reported, another was the blocker.
    pins = {"tensor_parallel": 3, "context_parallel": 5, "schedule": "zbv", "virtual_stages": 3}
    found = illegal(pinned("llama31_8b", **pins), 0)
    named = {d.field.rsplit(".", 1)[-1] for d in found}
    assert named == {"tensor_parallel", "context_parallel", "virtual_stages"}


def test_more_devices_than_there_are() -> None:
    made = rebuilt(blueprint("llama31_8b"), cluster(8))
    found = only(illegal(problem_of(made, pins={"pipeline_parallel": 4, "tensor_parallel": 8}), 0))
    assert found.code == "BP403"
    assert "takes 32 devices, the cluster has 8" in found.summary
    assert found.because == ("pipeline_parallel 4", "tensor_parallel 8")


def test_too_few_micro_batches_are_explained_in_the_users_words() -> None:
    # Speech#14288: "micro-batches in a virtual stage should range in [6, 3]".
    made = rebuilt(blueprint("llama31_8b"), cluster(64) | {"training.stages.0.global_batch": 16 * 8192})
    found = only(illegal(problem_of(made, pins={"pipeline_parallel": 8, "data_parallel_shard": 4}), 0))
    assert found.summary.startswith("a pipeline of 8 needs at least 8 micro-batches, there are 4")
    assert "raise the global batch" in found.summary
    assert any(line.startswith("pipeline_parallel: 4") for line in found.legal)


def test_zero_three_under_a_pipeline_is_refused_with_the_reason() -> None:
    found = only(illegal(pinned("llama31_405b", pipeline_parallel=2, zero=3), 0))
    assert found.code == "BP404"
    assert any("torch's pipeline stages" in reason for reason in found.because)


@pytest.mark.parametrize("level", [2, 3])
def test_zero_levels_that_no_pipeline_has_name_the_one_that_it_has(level: int) -> None:
    found = only(illegal(pinned("llama31_405b", pipeline_parallel=2, zero=level), 0))
    assert found.legal == ("1",)


@pytest.mark.parametrize(
    ("pins", "field", "legal"),
    [
        ({"schedule": "zbv", "virtual_stages": 3}, "virtual_stages", ("2",)),
        ({"schedule": "1f1b", "virtual_stages": 2}, "virtual_stages", ("1",)),
        ({"schedule": "interleaved_1f1b", "virtual_stages": 1}, "virtual_stages", ("2", "3", "4")),
        ({"schedule": "dualpipev", "pipeline_parallel": 1}, "schedule", ("none",)),
        (
            {"schedule": "none", "pipeline_parallel": 2},
            "schedule",
            ("1f1b", "interleaved_1f1b", "zbv", "dualpipev"),
        ),
    ],
)
def test_a_schedule_that_the_other_pins_rule_out_is_refused_with_what_it_takes(
    pins: dict[str, Any], field: str, legal: tuple[str, ...]
) -> None:
    found = only(illegal(pinned("llama31_405b", **pins), 0))
    assert found.field.endswith(field)
    assert found.legal == legal


def with_micro_batches(count: int, **pins: Any) -> Diagnostic:
    """What is said of a pipeline of 4 over 8 devices whose ranks get so many micro-batches."""
    made = rebuilt(blueprint("llama31_8b"), cluster(8) | {"training.stages.0.global_batch": 2 * count * 8192})
    held = {"pipeline_parallel": 4, "data_parallel_shard": 2, "micro_batch": 1, **pins}
    return only(illegal(problem_of(made, pins=held), 0))


def test_micro_batches_that_torch_cannot_deal_are_refused_with_the_nearest_numbers() -> None:
    found = with_micro_batches(9, virtual_stages=2, schedule="interleaved_1f1b")
    assert "4 ranks in 2 equal rounds, which 9 do not make; it takes 8, 10" in found.summary


def test_dualpipev_is_refused_fewer_micro_batches_than_chunks() -> None:
    found = with_micro_batches(6, schedule="dualpipev")
    assert found.summary.startswith("dualpipev over 4 ranks needs at least 8 micro-batches, there are 6")


def test_derived_group_sizes_are_shown() -> None:
    # Megatron-Bridge#546, Speech#14838: a silent default miscomputed the group.
    made = rebuilt(blueprint("qwen3_30b_a3b"), cluster(16) | {"training.stages.0.global_batch": 32 * 4096})
    found = only(
        illegal(
            problem_of(made, pins={"data_parallel_shard": 2, "tensor_parallel": 1, "expert_parallel": 64}), 0
        )
    )
    assert any("devices /" in line for line in found.because)
    assert any("dp_shard x cp x tp" in line for line in found.because)
    assert found.legal


def test_legal_pins_are_kept() -> None:
    made = stage_problem("llama31_8b", pins={"tensor_parallel": 4, "recompute": "full"})
    assert illegal(made, 0) == []


def test_nothing_fits_says_by_how_much_and_what_would() -> None:
    found = refused(cluster(1, memory_gib=40))[0]
    assert found.code == "PL001"
    assert "does not fit" in found.summary
    assert "GiB" in found.because[0]
    assert "too many" in found.because[0]
    assert found.help.startswith("What would make it fit")


def test_every_stage_that_does_not_fit_is_named() -> None:
    found = refused(cluster(8, memory_gib=8))
    assert len(found) == len(blueprint("llama31_8b").training.stages)
    assert {d.field for d in found} == {"training.stages.0", "training.stages.1"}


def test_a_pin_that_leaves_nothing_names_the_pin() -> None:
    made = rebuilt(
        blueprint("deepseek_v3"),
        cluster(256)
        | {"training.layout": {"pipeline_parallel": 1, "expert_parallel": 1, "recompute": "none"}},
    )
    found = make_plan(made)
    assert isinstance(found, list)
    assert any("leaving out pinned" in d.help for d in found)


@pytest.mark.parametrize("devices", [1, 7, 12])
def test_odd_clusters_get_a_plan_or_a_reason(devices: int) -> None:
    made = make_plan(rebuilt(blueprint("tiny"), cluster(devices, per_node=devices)))
    assert isinstance(made, Plan) or all(d.summary and d.help for d in made)
