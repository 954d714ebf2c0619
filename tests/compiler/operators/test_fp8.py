"""What runs in fp8 is said once, by parameters: kernels, limits and the runtime's modules follow from it."""

from __future__ import annotations

import pytest
from torch import nn

from shipway.compiler.lower import lower
from shipway.compiler.operators.base import Cast, Gemm, Shard, flops
from shipway.compiler.operators.fp8 import (
    GRANULE,
    fp8_limits,
    fp8_products,
    kernels_of,
    recomputed,
    runs_in_fp8,
    scratch_bytes,
)
from shipway.compiler.operators.gated_unit import GatedUnit
from shipway.schemas.model import Model
from tests.templates.generated import VARIANTS, blueprint_model, load, variant

NEVER = ("router", "head", "embed", "norm", "decay_down", "decay_up", "beta_proj", "experts", "vision")
UNIT = GatedUnit(width=64, inner_width=256)
BF16 = Shard(sequences=2, context=128)
FP8 = Shard(sequences=2, context=128, fp8_smallest=16)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_tensor_that_may_run_in_fp8_is_the_weight_of_a_linear_module(name: str) -> None:
    model = variant(name)
    modules = dict(load(model).Model().named_modules())
    named = [parameter for parameter in lower(model).named_parameters() if parameter[1].fp8]
    assert named
    for path, _ in named:
        module = path.removesuffix(".weight")
        assert isinstance(modules[module], nn.Linear), path
        assert not set(NEVER) & set(module.split("."))


@pytest.mark.parametrize("name", ["k3", "deepseek_v3", "qwen3_235b", "llama31_405b"])
def test_every_such_tensor_has_a_product_of_its_name(name: str) -> None:
    for layer in lower(blueprint_model(name)).layers:
        for placed in layer.operators:
            products = {k.name for k in placed.operator.kernels(BF16) if isinstance(k, Gemm)}
            assert fp8_products(placed.operator, 16) <= products


def test_narrow_and_uneven_projections_stay_in_bf16() -> None:
    gate, _, down = UNIT.parameters()
    assert runs_in_fp8(gate, 64)
    assert runs_in_fp8(down, 64)
    assert not runs_in_fp8(gate, 128)
    uneven = GatedUnit(width=64, inner_width=256 + GRANULE // 2)
    assert fp8_products(uneven, 16) == frozenset()


def test_products_are_the_same_ones_with_their_casts_behind_them() -> None:
    plain, rounded = kernels_of(UNIT, BF16), kernels_of(UNIT, FP8)
    assert plain == UNIT.kernels(BF16)
    assert flops(rounded) == flops(plain)
    assert [k.name for k in rounded if isinstance(k, Gemm) and k.fp8] == ["gate", "up", "down"]
    assert sum(isinstance(k, Cast) for k in rounded) == 3
    # 256 tokens: input of 64, weight of 64 x 256, read in two and written in one byte.
    assert next(k.forward_bytes for k in rounded if isinstance(k, Cast)) == 3 * (256 * 64 + 64 * 256)


def test_recomputation_rounds_again_even_where_it_keeps_products() -> None:
    kept = recomputed(UNIT, FP8, "selective")
    assert not [k for k in kept if isinstance(k, Gemm)]
    assert [k.name for k in kept if isinstance(k, Cast)] == ["gate in fp8", "up in fp8", "down in fp8"]
    assert recomputed(UNIT, FP8, "full") == kernels_of(UNIT, FP8)
    assert recomputed(UNIT, FP8, "none") == ()


def test_uncompiled_rounding_takes_copies_in_fp32() -> None:
    plain = Shard(sequences=2, context=128, fp8_smallest=16, casts_fused=False)
    x, w, g = 256 * 64, 64 * 256, 256 * 256
    assert scratch_bytes(UNIT, BF16) == 0
    assert scratch_bytes(UNIT, FP8) == 2 * g + w + x
    assert scratch_bytes(UNIT, plain) == 2 * g + w + x + 8 * g


def test_tensor_parallel_leaves_whole_granules() -> None:
    limits = {limit.value for limit in fp8_limits(UNIT.parameters(), 16)}
    assert limits == {256 // GRANULE}


def test_large_models_have_most_of_their_products_in_fp8() -> None:
    model: Model = blueprint_model("llama31_405b")
    named = [p for _, p in lower(model).named_parameters() if runs_in_fp8(p, 2048)]
    # All but keys and values (1024 wide), embedding, head, norms.
    assert len(named) == 126 * 5
