"""Whole plans: consistent, complete, deterministic."""

from functools import cache

import pytest
from rich.console import Console

from shipway.compiler.efficiency import default_calibration
from shipway.compiler.parameters import count
from shipway.compiler.pipeline import PASSES, make_plan
from shipway.compiler.plan_warnings import plan_warnings
from shipway.compiler.render.plan import render_plan
from shipway.compiler.render.units import money
from shipway.compiler.step_time import EXPOSED
from shipway.schemas.capability import CAPABILITY
from shipway.schemas.plan import Plan, canonical_json
from tests.compiler.planner.planning import blueprint, stage_problem

NAMES = ("tiny", "small_h200", "k3")


@cache
def plan(name: str) -> Plan:
    made = make_plan(blueprint(name), (name,))
    assert isinstance(made, Plan)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_items_add_up(name: str) -> None:
    for stage in plan(name).stages:
        assert sum(item.seconds for item in stage.time) == pytest.approx(stage.step_seconds, rel=1e-9)
        for budget in stage.memory.ranks:
            assert sum(item.bytes for item in budget.items) == budget.peak_bytes
            inside = sum(item.bytes for item in budget.items if item.category != "outside")
            assert inside == budget.reserved_bytes
            assert budget.reserved_bytes + budget.outside_bytes == budget.peak_bytes <= budget.upper_bytes
            assert budget.allocated_bytes <= budget.reserved_bytes
            sizes = [item.bytes for item in budget.items]
            assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_ledger_leaves_exposed_of_sharding_is_what_the_step_counts(name: str) -> None:
    for stage in plan(name).stages:
        axes = ("dp_shard", "dp_replicate", "expert_shard")
        exposed = sum(
            line.exposed_seconds
            for line in stage.communication
            if line.axis in axes and "layer parameters" in line.name
        )
        counted = sum(item.seconds for item in stage.time if item.name == EXPOSED)
        assert (exposed > 0) == (counted > 0)
        assert exposed <= counted * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_worst_rank_stands_on_top(name: str) -> None:
    for stage in plan(name).stages:
        assert stage.memory.peak_bytes == max(budget.peak_bytes for budget in stage.memory.ranks)
        assert len(stage.memory.ranks) == stage.layout.pipeline_parallel


@pytest.mark.parametrize("name", NAMES)
def test_layouts_use_what_the_cluster_has(name: str) -> None:
    made = plan(name)
    for stage in made.stages:
        layout = stage.layout
        assert layout.world_size == stage.devices_used <= made.blueprint.cluster.devices
        sequences = layout.data_parallel * layout.micro_batch * layout.micro_batches
        assert sequences == stage.sequences_per_step
        assert stage.layout.stage_layers[0][0] == 0
        assert stage.layout.stage_layers[-1][1] == made.blueprint.model.layers
        assert len(layout.stage_layers) == layout.pipeline_parallel * layout.virtual_stages
        assert stage.tokens_per_second == pytest.approx(
            stage.sequences_per_step * stage.context_tokens / stage.step_seconds
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_fits_and_says_so(name: str) -> None:
    for stage in plan(name).stages:
        assert stage.memory.verdict == "fits"
        assert stage.memory.peak_bytes <= plan(name).blueprint.cluster.device.memory


@pytest.mark.parametrize("name", NAMES)
def test_the_same_blueprint_gives_the_same_plan(name: str) -> None:
    again = make_plan(blueprint(name), (name,))
    assert isinstance(again, Plan)
    assert canonical_json(again) == canonical_json(plan(name))
    assert again.hash == again.sealed().hash


def test_a_plan_survives_its_file() -> None:
    made = plan("k3")
    assert Plan.model_validate_json(canonical_json(made)) == made


def test_utilisation_is_a_share() -> None:
    for name in NAMES:
        for stage in plan(name).stages:
            assert 0 < stage.mfu <= stage.hfu < 1


@pytest.mark.parametrize("name", [*NAMES, "deepseek_v3", "llama31_405b", "mixtral_8x7b"])
def test_rows_hold_every_parameter_of_the_model_once(name: str) -> None:
    """torchtitan#963, Megatron-LM#2833: none lost in a cut, none owned twice."""
    made = stage_problem(name)
    counted = sum(
        repeats * sum(p.count for p in row.parameters())
        for row, repeats in zip(made.work.rows, made.work.totals.tolist(), strict=True)
    )
    assert counted == count(made.blueprint.model).total


def test_unproven_axes_are_warned_of_in_one_line() -> None:
    made = plan("k3")
    unproven = {support.axis for support in CAPABILITY.axes if not support.proven}
    assert any("make parity" in warning for warning in made.warnings) == bool(unproven)
    doubted = tuple(a.model_copy(update={"proven": a.axis not in ("tp", "ep")}) for a in CAPABILITY.axes)
    capability = CAPABILITY.model_copy(update={"axes": doubted})
    figures = default_calibration(made.blueprint.cluster.device)
    told = plan_warnings(made.blueprint, figures, made.stages, capability)
    (line,) = (warning for warning in told if "make parity" in warning)
    assert "tensor parallel and expert parallel" in line


def test_idle_devices_are_told_with_what_holding_them_costs() -> None:
    made = plan("k3")
    held = made.blueprint.cluster.devices
    idle = [stage for stage in made.stages if stage.devices_used < held]
    assert idle
    for stage in idle:
        (line,) = (warning for warning in made.warnings if f"stage {stage.name} leaves" in warning)
        assert money(stage.cost) in line
        assert money(stage.hours * held * made.blueprint.cluster.price_per_device_hour) in line


def test_passes_tell_what_they_made() -> None:
    seen: dict[str, object] = {}
    make_plan(blueprint("tiny"), dump=seen.__setitem__)
    assert set(seen) <= {each.name for each in PASSES}
    assert {"lower", "fabric", "search", "assemble"} <= set(seen)


def test_measured_and_assumed_devices_are_told_apart() -> None:
    assert not default_calibration(blueprint("small_h200").cluster.device).estimate
    assert default_calibration(blueprint("k3").cluster.device).estimate
    assert default_calibration(blueprint("tiny").cluster.device).estimate


@pytest.mark.parametrize("name", NAMES)
def test_the_terminal_shows_what_a_newcomer_needs(name: str) -> None:
    console = Console(width=120, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render_plan(plan(name)))
    text = capture.get()
    made = plan(name)
    assert f"{made.parameters.total:,}" in text
    for stage in made.stages:
        assert f"stage {stage.name}" in text
        assert f"Best of {stage.candidates:,} legal layouts" in text
    assert "MFU" in text
    idle = any(stage.devices_used < made.blueprint.cluster.devices for stage in made.stages)
    assert ("idle ones left out" in text.replace("\n", " ")) == idle
    assert "fits" in text


def test_planning_never_imports_torch_or_networkx() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from shipway.compiler.pipeline import make_plan; "
        "from shipway.compiler.compose import compose; from shipway.compiler.validate import validate; "
        "make_plan(validate(compose('tiny', (), None))[0]); "
        "sys.exit(' '.join(m for m in ('torch', 'networkx', 'scipy') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
