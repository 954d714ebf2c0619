"""The blueprints that come with Shipway."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shipway.compiler.compose import compose
from shipway.compiler.documents import read_document
from shipway.compiler.groups import our_folder
from shipway.compiler.json_schema import GROUPS, json_schema
from shipway.compiler.parameters import count
from shipway.compiler.validate import validate
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.cluster import Cluster

FOLDER = our_folder()
COMPLETE = sorted(FOLDER.glob("*.yaml"))
CLUSTERS = sorted(path.stem for path in (FOLDER / "cluster").glob("*.yaml"))
DEVICES = sorted(path.stem for path in (FOLDER / "device").glob("*.yaml"))
ALL = sorted(FOLDER.glob("**/*.yaml"))


def valid(name: str, *overrides: str) -> Blueprint:
    """A blueprint of ours, which must have no mistake."""
    blueprint, diagnostics = validate(compose(name, overrides))
    assert blueprint is not None, diagnostics
    assert [d for d in diagnostics if d.severity == "error"] == []
    return blueprint


@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.stem)
def test_complete_blueprint_is_valid_and_named_as_its_file(path: Path) -> None:
    blueprint, diagnostics = validate(compose(path.stem))
    assert blueprint is not None, diagnostics
    assert blueprint.name == path.stem
    # Only Kimi Linear was published with the decay that is warned of.
    assert [d.code for d in diagnostics] == (["BP207"] if path.stem == "kimi_linear_48b" else [])


PUBLISHED = {
    "k3": 2_779_931_834_976,
    "deepseek_v3": 671_026_419_200,
    "kimi_k2": 1_026_408_232_448,
    "kimi_linear_48b": 49_122_681_728,
    "qwen3_235b": 235_093_634_560,
    "qwen3_30b_a3b": 30_532_122_624,
    "mixtral_8x7b": 46_702_792_704,
    "llama31_405b": 405_853_388_800,
    "llama31_70b": 70_553_706_496,
    "llama31_8b": 8_030_261_248,
}
"""Totals of the published checkpoints; K3's without the zeros that its checkpoint pads A_log with (2,208)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_total(name: str) -> None:
    assert count(valid(name).model).total == PUBLISHED[name]


def test_sizes_of_our_own_models() -> None:
    assert 2e6 < count(valid("tiny").model).total < 1e7
    assert 1e9 < count(valid("small_h200").model).total < 3e9
    assert count(valid("k3").model).active == 104_189_530_208


@pytest.mark.parametrize("name", ["tiny", "small_h200", "k3"])
def test_reference_models_have_every_text_block(name: str) -> None:
    model = valid(name).model
    assert set(model.attention_kinds()) == {"delta", "latent"}
    assert set(model.feed_forward_kinds()) == {"dense", "experts"}
    assert model.attention.delta is not None
    assert model.attention.delta.decay.kind == "bounded"
    assert model.attention.latent is not None
    assert model.attention.latent.position.kind == "none"
    assert model.attention.latent.output_gate == "elementwise"
    assert model.residual.kind == "block"
    assert model.feed_forward.activation.kind == "situ"
    experts = model.feed_forward.experts
    assert experts is not None
    assert experts.latent_width is not None
    assert experts.shared > 0
    assert experts.balancing.kind == "quantile"


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_is_valid_and_named_as_its_file(name: str) -> None:
    cluster: Cluster = valid("k3", f"cluster={name}").cluster
    assert cluster.name == name
    if "x" in name.rpartition("_")[2]:
        nodes, devices = name.rpartition("_")[2].split("x")
        assert (cluster.nodes, cluster.devices_per_node) == (int(nodes), int(devices))


@pytest.mark.parametrize("name", DEVICES)
def test_device_is_plausible(name: str) -> None:
    device = valid("tiny", f"cluster.device={name}").cluster.device
    assert device.peak.bf16 <= 2.5e15
    assert device.memory_bandwidth >= device.link_bandwidth
    assert device.source
    if device.kind != "cpu":
        assert device.reported_names
        assert 79e9 < device.memory < 300e9
        # Bytes moved and FLOPs done in a second are within the ratios of real accelerators.
        assert 30 < device.peak.bf16 / device.memory_bandwidth < 400


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(FOLDER)))
def test_json_schema_accepts_it(path: Path) -> None:
    from jsonschema import Draft202012Validator

    group = "blueprint" if path.parent == FOLDER else path.parent.name
    Draft202012Validator(_schemas()[group]).validate(read_document(path).data)


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(FOLDER)))
def test_editor_is_told_the_schema(path: Path) -> None:
    first, second = path.read_text().splitlines()[:2]
    named = first.removeprefix("# yaml-language-server: $schema=")
    group = "blueprint" if path.parent == FOLDER else path.parent.name
    assert (path.parent / named).resolve() == FOLDER.resolve() / f"schema/{group}.json"
    assert second.startswith("# "), "say in a comment what this is"


@pytest.mark.parametrize("group", GROUPS)
def test_kept_schema_is_current(group: str) -> None:
    kept = json.loads((FOLDER / f"schema/{group}.json").read_text())
    assert kept == _schemas()[group], "run: shipway schema --out blueprints/schema"


WRONG: list[tuple[str, Any]] = [
    ("blueprint", {"modle": {}}),
    ("blueprint", {"cluster": {"nodes": [1]}}),
    ("model", {"residual": {"kind": "blocky"}}),
    ("model", {"attention": {"mix": {"pattern": ["delta", "latnet"]}}}),
    ("training", {"stages": [{"context": {}}]}),
    ("device", {"kind": "gpu"}),
]


@pytest.mark.parametrize(("group", "data"), WRONG)
def test_json_schema_refuses(group: str, data: Any) -> None:
    from jsonschema import Draft202012Validator

    assert not Draft202012Validator(_schemas()[group]).is_valid(data)


def test_json_schema_lets_anything_be_an_interpolation() -> None:
    from jsonschema import Draft202012Validator

    data = {
        "name": "${oc.env:NAME}",
        "model": {"width": "${.heads}", "attention": "${other}"},
        "training": {"seed": "???", "stages": [{"context": "${a.b}", "mix": {"x": "${y}"}}]},
        "cluster": {"device": "h200"},
    }
    Draft202012Validator(_schemas()["blueprint"]).validate(data)


@cache
def _schemas() -> dict[str, Any]:
    return {group: json_schema(group) for group in GROUPS}


@pytest.mark.parametrize(
    ("cluster", "name", "expected"),
    [
        ("h20_16x8", "NVIDIA H20", True),
        ("h20_16x8", "NVIDIA H200", False),
        ("h200_8", "NVIDIA H200 NVL", True),
        ("a100_16x8", "NVIDIA A100-SXM4-80GB", True),
    ],
)
def test_a_device_answers_to_its_name_and_not_to_a_longer_one(
    cluster: str, name: str, expected: bool
) -> None:
    blueprint, _ = validate(compose("llama31_8b", (f"cluster={cluster}",), None))
    assert blueprint.cluster.device.answers_to(name) is expected
