"""What layers keep in host memory comes back as it was, in time for each layer's backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.parallel.offload import HostInputs, apply_offloaded_recompute
from shipway.runtime.parallel.recompute import apply_recompute
from shipway.runtime.parallel.support import check_layout
from shipway.schemas.layout import Layout
from tests.templates.generated import load, variant

CPU = torch.device("cpu")


def gradients(name: str, recompute: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """Of two micro-batches that are in flight together, and go backward in the other order."""
    module = load(variant(name))
    model = module.Model()
    model.init_weights(torch.Generator().manual_seed(0))
    recompute(model)
    losses = []
    for seed in range(2):
        tokens = torch.randint(0, module.VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(seed))
        losses.append(model(tokens, tokens))
    for loss in reversed(losses):
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["hybrid", "rotary latent", "grouped"])
def test_gradients_are_those_of_recomputation_bit_for_bit(name: str) -> None:
    kept = gradients(name, lambda model: apply_recompute(model, "full"))
    moved = gradients(name, lambda model: apply_offloaded_recompute(model, CPU))
    assert kept.keys() == moved.keys()
    assert all(torch.equal(kept[name], moved[name]) for name in kept)


def test_the_next_one_is_sent_for_when_one_is_used_and_two_leave_at_a_time() -> None:
    inputs = HostInputs(CPU)
    inputs.begin()
    states = [torch.full((3,), float(i)) for i in range(4)]
    packed = [inputs.pack(state) for state in states]
    assert len(inputs._leaving) == 2
    boundaries = torch.tensor([0, 3])
    assert inputs.pack(boundaries) is boundaries
    assert torch.equal(inputs.unpack(packed[3]), states[3])
    assert not inputs._leaving, "backward has begun"
    assert [one.back is not None for one in packed] == [False, False, True, False]
    assert torch.equal(inputs.unpack(packed[2]), states[2])
    assert torch.equal(inputs.unpack(packed[2]), states[2]), "as often as it is asked for"
    inputs.begin()
    first = inputs.pack(states[0])
    inputs.unpack(first)
    assert packed[3].back is None, "nothing goes backward behind a first layer"


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_plan_that_moves_activations_without_recomputation_is_refused(recompute: str) -> None:
    layout = Layout(offload="activations").model_copy(update={"recompute": recompute})
    with pytest.raises(Fatal, match="recompute: full"):
        check_layout(layout)
