"""State of generation is what the generated model's caches hold."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shipway.compiler.compose import compose
from shipway.compiler.lower import lower
from shipway.compiler.operators.base import DecodeState
from shipway.schemas.model import Model
from tests.compiler.operators.generated import generated, initialised
from tests.compiler.operators.models import examples, models


def stated(model: Model, layer: int) -> DecodeState:
    states = [placed.operator.decode_state() for placed in lower(model).layers[layer].operators]
    return DecodeState(
        sum(state.bytes_per_token for state in states), sum(state.constant_bytes for state in states)
    )


@examples(10)
@given(models(layers=2), st.integers(1, 3))
def test_caches_of_the_generated_model(model: Model, sequences: int) -> None:
    module = initialised(generated(model).Model(), torch.bfloat16).eval()
    prompts = [torch.randint(0, model.vocabulary, (20 + n,)) for n in range(sequences)]
    _, caches = module.prefill(prompts)
    for layer, kind in enumerate(model.attention_kinds()):
        cache, state = caches.layers[str(layer)], stated(model, layer)
        if kind == "delta":
            kept = (cache.state, cache.q_tail, cache.k_tail, cache.v_tail)
            assert sum(tensor.nbytes for tensor in kept) == sequences * state.constant_bytes
            assert state.bytes_per_token == 0
        else:
            assert cache.values[0].nbytes == state.bytes_per_token
            assert state.constant_bytes == 0


def test_k3_as_published() -> None:
    # Kimi K3, 1.5 and 2 of the design's sources: 27,648 bytes a token, 434 MB of delta state a sequence.
    model = Model.from_data(compose("k3").data["model"])
    states = [stated(model, layer) for layer in range(model.layers)]
    assert sum(state.bytes_per_token for state in states) == 24 * 576 * 2 == 27_648
    tails = 69 * 3 * 3 * 96 * 128 * 2
    assert sum(state.constant_bytes for state in states) == 69 * 96 * 128 * 128 * 4 + tails
