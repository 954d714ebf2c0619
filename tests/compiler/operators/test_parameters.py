"""Parameters of the catalogue are those of the generated module: names, shapes, groups."""

from __future__ import annotations

import torch
from hypothesis import given

from shipway.compiler.lower import lower
from shipway.compiler.parameters import count
from shipway.schemas.model import Model
from tests.compiler.operators.generated import generated
from tests.compiler.operators.models import examples, models


@examples(25)
@given(models(vision=True))
def test_state_dict_of_the_generated_module_is_met_name_by_name(model: Model) -> None:
    with torch.device("meta"):
        module = generated(model).Model()
    actual = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    stated = {name: parameter.shape for name, parameter in lower(model).named_parameters()}
    assert stated == actual
    assert count(model).total == sum(tensor.numel() for tensor in module.state_dict().values())


@examples(15)
@given(models(vision=True))
def test_only_buffers_have_no_optimizer(model: Model) -> None:
    with torch.device("meta"):
        module = generated(model).Model()
    trained = {name for name, _ in module.named_parameters()}
    for name, parameter in lower(model).named_parameters():
        assert (parameter.optimizer != "none") == (name in trained)


@examples(15)
@given(models())
def test_muon_takes_matrices_whose_heads_divide_their_rows(model: Model) -> None:
    for name, parameter in lower(model).named_parameters():
        if parameter.optimizer == "muon":
            rows = parameter.shape[-2]
            assert len(parameter.shape) == (3 if ".experts." in name else 2)
            assert rows % parameter.muon_heads == 0
