"""Lowering: equal layers are one object, sites know their sources, the graph says who reads whom."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipway.compiler.lower import final_sources, lower, sources_read
from shipway.compiler.operators.attention_residual import AttentionResidual
from shipway.schemas.model import Model
from tests.compiler.operators.generated import generated
from tests.compiler.operators.models import examples, models

PLAIN: dict[str, Any] = {
    "vocabulary": 97,
    "width": 32,
    "layers": 5,
    "attention": {
        "mix": {"pattern": ["delta", "delta", "grouped"], "tail": ["grouped", "grouped"]},
        "delta": {"heads": 2},
        "grouped": {"heads": 2, "kv_heads": 1},
    },
    "feed_forward": {
        "mix": {"head": ["dense"], "pattern": ["experts"]},
        "dense_inner_width": 48,
        "experts": {"routed": 4, "active": 2, "inner_width": 16},
    },
}


def model_with(**changes: Any) -> Model:
    return Model.from_data(PLAIN | changes)


def test_equal_layers_are_one_object_and_counted() -> None:
    lowered = lower(model_with())
    assert [(part.name, number) for part, number in lowered.layer_kinds()] == [
        ("delta attention + dense", 1),
        ("delta attention + experts", 1),
        ("grouped attention + experts", 3),
    ]
    assert lowered.layers[2] is lowered.layers[3] is lowered.layers[4]


@examples(8)
@given(st.integers(1, 9), st.integers(1, 4))
def test_block_sites_read_what_the_generated_layers_hand_on(layers: int, block: int) -> None:
    mixes = {
        "attention": PLAIN["attention"] | {"mix": ["grouped"] * layers},
        "feed_forward": PLAIN["feed_forward"] | {"mix": ["dense"] * layers},
    }
    model = model_with(layers=layers, residual={"kind": "block", "block_layers": block}, **mixes)
    import torch

    module = generated(model).Model()
    seen: list[int] = []
    for site in module.modules():
        if type(site).__name__ == "AttentionResidual":
            site.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    module(tokens)
    stated = [sources for layer in range(layers) for sources in sources_read(model, layer) or ()]
    assert seen == [*stated, final_sources(model)]


def test_k3_reads_nine_sources_at_the_end() -> None:
    model = model_with(
        layers=93,
        residual={"kind": "block", "block_layers": 12},
        attention=PLAIN["attention"] | {"mix": {"pattern": ["delta"]}},
        feed_forward=PLAIN["feed_forward"] | {"mix": {"pattern": ["dense"]}},
    )
    assert sources_read(model, 0) == (1, 2)
    assert sources_read(model, 12) == (2, 3)
    assert final_sources(model) == 9


@examples(15)
@given(models(layers=4))
def test_graph_reaches_the_head_from_every_operator(model: Model) -> None:
    import networkx

    graph = lower(model).graph()
    assert networkx.is_directed_acyclic_graph(graph)
    without_prediction = {node for node in graph if not node.startswith("prediction")}
    assert networkx.ancestors(graph, "head") | {"head"} == without_prediction
    kinds = {data["kind"] for *_, data in graph.edges(data=True)}
    assert ("attention residual" in kinds) == (model.residual.kind == "full" or "block.0" in graph)


@examples(15)
@given(models(layers=4))
def test_graph_edges_agree_with_the_sites_sources(model: Model) -> None:
    if model.residual.kind != "full":
        return
    graph, lowered = lower(model).graph(), lower(model)
    for index, layer in enumerate(lowered.layers):
        sites = [p.operator for p in layer.operators if isinstance(p.operator, AttentionResidual)]
        for role, site in zip(("attention", "feed_forward"), sites, strict=True):
            assert graph.in_degree(f"layers.{index}.{role}") == site.sources


def test_lowering_imports_no_networkx_and_no_torch() -> None:
    check = (
        "import sys, shipway.compiler.parameters; print('networkx' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 6}, "pattern"),
        ({"attention": PLAIN["attention"] | {"mix": ["latent"] * 5}}, "attention.latent is not given"),
        ({"feed_forward": {"mix": ["dense"] * 5}}, "dense_inner_width is not given"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lower(model_with(**changes))
