"""FLOPs are those that torch's counter sees in the generated model, forward and backward, exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shipway.compiler.lower import lower
from shipway.compiler.operators.base import Attention, DeltaRule, Flops, Gemm, Shard, flops
from shipway.compiler.operators.counted_flops import counted_flops
from shipway.compiler.operators.delta_core import PAIRWISE_TILE, TILE
from shipway.runtime.kernels import delta
from shipway.schemas.model import Model
from tests.compiler.operators.generated import generated, initialised
from tests.compiler.operators.measure import counted_flops as measured_flops
from tests.compiler.operators.models import examples, models


@examples(8)
@given(models(), st.integers(1, 2), st.sampled_from([96, 128, 130]))
def test_whole_model(model: Model, sequences: int, context: int) -> None:
    module = initialised(generated(model).Model())
    tokens = torch.randint(0, model.vocabulary, (sequences, context))
    shard = Shard(sequences, context, element_bytes=4, implementation="plain")
    kernels = [kernel for _, part in lower(model).placed_parts() for kernel in part.kernels(shard)]
    counted = counted_flops(kernels, "plain")
    assert (counted.forward, counted.backward) == measured_flops(lambda: module(tokens, tokens))


@examples(8)
@given(models(layers=1, vision=True), st.integers(1, 3))
def test_vision(model: Model, images: int) -> None:
    assert model.vision is not None
    module = initialised(generated(model).Model())
    side = 4 * model.vision.merge
    patches = images * side * side
    pixels = torch.randn(patches, 3 * model.vision.patch**2)
    grids = torch.tensor([[side, side]] * images)
    shard = Shard(
        1, 128, element_bytes=4, implementation="plain", patches=patches, patches_per_image=side * side
    )
    part = lower(model).vision
    assert part is not None
    counted = counted_flops(part.kernels(shard), "plain")
    assert (counted.forward, counted.backward) == measured_flops(lambda: module.vision(pixels, grids))


def test_delta_rule_at_equal_widths_is_the_papers_formula() -> None:
    # Kimi Linear, arXiv 2510.26692, Eq. 13: 6 d^2 + 3 C d + C^2 a token and head.
    kernel = DeltaRule("delta", 1, 1, 128, 128, 64, bounded=True)
    assert flops((kernel,)).forward == 6 * 128**2 + 3 * 64 * 128 + 64**2 == 126_976


def test_causal_attention_costs_half_of_the_square() -> None:
    kernel = Attention("attention", 2, 3, 128, 128, 24, 16)
    assert flops((kernel,)).forward == 2 * 3 * 128 * 128 * (24 + 16)
    assert counted_flops((kernel,), "fused") == Flops(
        2 * flops((kernel,)).forward, 2 * 2 * 3 * 128 * 128 * (3 * 24 + 2 * 16)
    )


def test_a_product_costs_twice_as_much_backward_unless_its_input_is_data() -> None:
    product = Gemm("product", 5, 7, 11)
    assert flops((product,)) == Flops(2 * 5 * 7 * 11, 4 * 5 * 7 * 11)
    first = Gemm("pixels", 5, 7, 11, input_gradient=False)
    assert flops((first,)).backward == 2 * 5 * 7 * 11


def test_tiles_are_the_kernels_own() -> None:
    assert (TILE, PAIRWISE_TILE) == (delta.TILE, delta.PAIRWISE_TILE)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_full_recomputation_repeats_forward_of_layers_alone(policy: str) -> None:
    model = Model.from_data(
        {
            "vocabulary": 97,
            "width": 32,
            "layers": 2,
            "attention": {"mix": ["grouped"] * 2, "grouped": {"heads": 2, "kv_heads": 1, "head_width": 16}},
            "feed_forward": {"mix": ["dense"] * 2, "dense_inner_width": 48},
        }
    )
    lowered, shard = lower(model), Shard(1, 64)
    layer = lowered.layers[0]
    assert layer.recomputed(shard, policy) == (layer.kernels(shard) if policy == "full" else ())
    assert lowered.head.recomputed(shard, policy) == lowered.final.recomputed(shard, policy) == ()
