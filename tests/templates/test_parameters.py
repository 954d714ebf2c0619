"""Tensors of generated models, on the meta device, against the operator catalogue and published totals."""

from __future__ import annotations

import re

import pytest
import torch

from shipway.compiler.emit.optimizer_groups import group_of
from shipway.compiler.lower import lower
from shipway.compiler.parameters import count
from shipway.schemas.model import Model
from tests.templates.generated import PUBLISHED, VARIANTS, blueprint_model, load, variant

PUBLISHED_TOTALS = {
    "k3": 2_779_931_837_184 - 2_208,  # less the padding of a_log in the published checkpoint
    "deepseek_v3": 671_026_419_200,
    "kimi_k2": 1_026_408_232_448,
    "kimi_linear_48b": 49_122_681_728,
    "qwen3_235b": 235_093_634_560,
    "mixtral_8x7b": 46_702_792_704,
    "llama31_405b": 405_853_388_800,
}
K3_LANGUAGE_MODEL, K3_TOWER, K3_PROJECTOR = 2_779_484_476_000, 401_214_464, 46_144_512


def on_meta(model: Model) -> torch.nn.Module:
    with torch.device("meta"):
        return load(model).Model()


def model_of(name: str) -> Model:
    return blueprint_model(name) if name in PUBLISHED else variant(name)


def elements(module: torch.nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.state_dict().values())


@pytest.mark.parametrize("name", [*PUBLISHED, *VARIANTS])
def test_state_dict_is_what_the_catalogue_states(name: str) -> None:
    model = model_of(name)
    stated = {path: parameter.shape for path, parameter in lower(model).named_parameters()}
    built = {path: tuple(tensor.shape) for path, tensor in on_meta(model).state_dict().items()}
    assert built == stated
    assert sum(torch.Size(shape).numel() for shape in built.values()) == count(model).total


@pytest.mark.parametrize("name", PUBLISHED_TOTALS)
def test_totals_are_the_published_ones(name: str) -> None:
    assert elements(on_meta(blueprint_model(name))) == PUBLISHED_TOTALS[name]


def test_parts_of_k3_are_the_published_ones() -> None:
    model = on_meta(blueprint_model("k3"))
    vision = model.vision
    projector = elements(vision.projector)
    assert (elements(vision) - projector, projector) == (K3_TOWER, K3_PROJECTOR)
    assert elements(model) - elements(vision) == K3_LANGUAGE_MODEL


@pytest.mark.parametrize("name", [*PUBLISHED, *VARIANTS])
def test_optimizer_groups_are_the_catalogues(name: str) -> None:
    model = model_of(name)
    groups = load(model).OPTIMIZER_GROUPS
    stated = dict(lower(model).named_parameters())
    for path, _ in on_meta(model).named_parameters():
        found = next(group for pattern, group in groups.items() if re.search(pattern, path))
        assert found == group_of(stated[path]), path


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_that_must_keep_precision_are_fp32_in_a_bf16_model(name: str) -> None:
    model = variant(name)
    torch.set_default_dtype(torch.bfloat16)
    try:
        tensors = on_meta(model).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for path, parameter in lower(model).named_parameters():
        assert tensors[path].dtype == (torch.float32 if parameter.fp32 else torch.bfloat16), path
