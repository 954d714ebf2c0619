"""Capacity of serving: weights and state as published, and what must hold of any layout."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from shipway.compiler.cli.app import run
from shipway.compiler.lower import lower
from shipway.compiler.serving import CONTEXTS, request_state, serving
from shipway.compiler.serving_weights import served_parts, serving_weights
from shipway.schemas.serving import Serving, ServingLayout
from tests.compiler.blueprint_files import WHOLE, write
from tests.compiler.planner.planning import blueprint, rebuilt


@cache
def served(name: str, *overrides: str) -> Serving:
    return serving(blueprint(name, *overrides))


def layouts(answer: Serving) -> list[ServingLayout]:
    return [layout for form in answer.formats for layout in form.layouts]


def test_k3_weights_are_the_published_checkpoint_but_for_three_named_choices() -> None:
    # The checkpoint of Kimi K3: 1,560,860,324,864 bytes with its routed experts in MXFP4.
    lowered = lower(blueprint("k3").model)
    ours = serving_weights(lowered, "mxfp4").bytes
    router = 92 * 896 * 7168 * 2  # kept in fp32 here, in bf16 there
    small = 69 * (3 * 96 * 128 * 4 + 128) * 2  # convolutions and output norms: fp32 there, bf16 here
    padding = 69 * 32 * 4  # A_log, padded there from 96 to 128 heads
    assert ours - router + small + padding == 1_560_860_324_864
    assert ours == pytest.approx(1_560_860_324_864, rel=1e-3)


def test_state_of_a_request_is_as_published() -> None:
    k3 = request_state(lower(blueprint("k3").model))
    assert (k3.cache_layers, k3.constant_layers) == (24, 69)
    assert k3.cache_bytes_per_token == 24 * 576 * 2 == 27_648
    assert k3.constant_bytes - 69 * 3 * 3 * 96 * 128 * 2 == 434_110_464
    assert request_state(lower(blueprint("deepseek_v3").model)).cache_bytes_per_token == 70_272


def test_cache_only_where_there_is_attention_over_tokens() -> None:
    # LM Studio#1862: caches of hybrids were estimated 40 to 67 % too large, as if every layer had one.
    model = blueprint("kimi_linear_48b").model
    state = request_state(lower(model))
    assert state.cache_layers == model.attention_kinds().count("latent")
    assert state.constant_layers == model.attention_kinds().count("delta")
    assert state.cache_layers + state.constant_layers == model.layers


@pytest.mark.parametrize("name", ["k3", "qwen3_30b_a3b", "llama31_8b"])
def test_devices_hold_what_they_are_given(name: str) -> None:
    answer = served(name)
    memory = blueprint(name).cluster.device.memory
    for layout in layouts(answer):
        assert layout.weight_bytes + layout.reserved_bytes + layout.state_bytes <= memory
        assert layout.state_bytes > 0
        stage = layout.tensor_parallel * layout.data_parallel
        assert layout.devices == stage * layout.pipeline_parallel
        assert layout.expert_parallel in (1, stage)


def test_a_group_of_one_device_holds_as_many_requests_as_fit() -> None:
    layout = served("llama31_8b").formats[0].layouts[0]
    assert layout.devices == 1
    for point in layout.points:
        assert point.request_bytes == point.context_tokens * 131_072
        assert point.requests == layout.state_bytes // point.request_bytes


def test_longer_contexts_take_more_and_leave_less() -> None:
    for layout in layouts(served("k3")):
        points = layout.points
        assert tuple(point.context_tokens for point in points) == CONTEXTS
        for shorter, longer in pairwise(points):
            assert longer.requests <= shorter.requests
            assert longer.prefill_seconds > shorter.prefill_seconds
            assert longer.decode_seconds > shorter.decode_seconds
        assert all(point.decode_seconds_full >= point.decode_seconds for point in points)


def test_a_token_takes_no_less_than_reading_the_weights_it_passes() -> None:
    answer = served("k3")
    bandwidth = blueprint("k3").cluster.device.memory_bandwidth
    for form in answer.formats:
        for layout in form.layouts:
            stage = layout.tensor_parallel * layout.data_parallel
            assert layout.points[0].decode_seconds > form.weights.bytes_per_token / stage / bandwidth


def test_memory_by_total_and_reading_by_active_parameters() -> None:
    weights = served("k3").formats[0].weights
    assert weights.bytes > 2 * 2_779_931_837_184
    assert weights.bytes_per_token == pytest.approx(2 * 104_189_530_208, rel=0.01)


def test_prediction_layers_are_not_loaded() -> None:
    lowered = lower(rebuilt(blueprint("deepseek_v3"), {"model.multi_token_prediction": {"depth": 1}}).model)
    assert lowered.prediction
    assert not set(lowered.prediction) & set(served_parts(lowered))


def test_a_cluster_that_is_too_small_is_told_so() -> None:
    form = served("k3", "cluster.nodes=1", "cluster.network=null").formats[0]
    assert form.layouts == ()
    assert "8 devices" in form.note


def test_command_prints_tables_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, WHOLE)
    assert run(["plan", "mine.yaml", "--serving", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert Serving.from_data(data).state.page_tokens == 64
    assert run(["plan", "mine.yaml", "--serving"]) == 0
    printed = capsys.readouterr().out
    assert "per token" in printed
    assert "first token" in printed
    assert run(["plan", "mine.yaml", "--serving", "--diff", "old.json"]) == 2
    assert "CL001" in capsys.readouterr().err
