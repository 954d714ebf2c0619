"""How layouts divide what an operator needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from shipway.compiler.lower import lower
from shipway.compiler.operators.base import Implementation, Shard, flops, forward_flops
from shipway.schemas.layout import Recompute
from shipway.schemas.model import Model
from tests.compiler.operators.models import examples, models

POLICIES: tuple[Recompute, ...] = ("none", "selective", "full")


@examples(10)
@given(models(vision=True))
def test_many_layouts_at_once_cost_what_each_costs_alone(model: Model) -> None:
    tensor, context_parallel, expert = [1.0, 2.0, 4.0, 2.0], [1.0, 1.0, 2.0, 4.0], [1.0, 3.0, 6.0, 2.0]
    together = Shard(2.0, 256.0, np.array(tensor), np.array(context_parallel), np.array(expert), 1.25)
    for _, part in lower(model).placed_parts():
        for index, degrees in enumerate(zip(tensor, context_parallel, expert, strict=True)):
            alone = Shard(2.0, 256.0, *degrees, 1.25)
            for policy in POLICIES:
                assert _pick(part.saved_bytes(together, policy), index) == pytest.approx(
                    part.saved_bytes(alone, policy)
                )
            assert _pick(flops(part.kernels(together)).forward, index) == pytest.approx(
                flops(part.kernels(alone)).forward
            )
            sizes = zip(part.transfers(together), part.transfers(alone), strict=True)
            assert all(_pick(many.bytes, index) == pytest.approx(one.bytes) for many, one in sizes)


def _pick(value: object, index: int) -> float:
    return float(np.broadcast_to(np.asarray(value), (4,))[index])


@examples(10)
@given(models())
def test_policies_keep_no_more_than_the_one_before(model: Model) -> None:
    shard = Shard(1, 4096)
    for part, _ in lower(model).layer_kinds():
        none, selective, full = (part.saved_bytes(shard, policy) for policy in POLICIES)
        assert none >= full
        assert selective >= full


@pytest.mark.parametrize("implementation", ["fused", "plain"])
@examples(6)
@given(models(feed_forward=("experts",)))
def test_expert_parallel_divides_no_routed_activation(implementation: Implementation, model: Model) -> None:
    # Each rank of the group brings its own tokens (Megatron-LM#6782).
    for part, _ in lower(model).layer_kinds():
        kept = [
            part.saved_bytes(Shard(1, 4096, expert=degree, implementation=implementation), "none")
            for degree in (1, 6)
        ]
        assert kept[0] == pytest.approx(kept[1])


@examples(6)
@given(models(feed_forward=("experts",)))
def test_expert_parallel_keeps_the_work_and_narrows_the_groups(model: Model) -> None:
    for part, _ in lower(model).layer_kinds():
        grouped = [
            [k for k in part.kernels(Shard(1, 4096, expert=degree)) if getattr(k, "grouped", False)]
            for degree in (1, 6)
        ]
        for whole, cut in zip(*grouped, strict=True):
            assert forward_flops(whole) == pytest.approx(forward_flops(cut))
            assert whole.groups == 6 * cut.groups


@examples(10)
@given(models())
def test_context_parallel_of_n_divides_products_of_delta_and_grouped_layers_by_n(model: Model) -> None:
    for part, _ in lower(model).layer_kinds():
        if "latent" in part.name:
            continue  # keys and values are made from all gathered latents, on every rank
        whole = flops(part.kernels(Shard(1, 4096))).forward
        assert flops(part.kernels(Shard(1, 4096, context_parallel=4))).forward == pytest.approx(whole / 4)


@examples(10)
@given(models())
def test_tensor_parallel_leaves_a_rank_between_its_share_and_the_whole(model: Model) -> None:
    for _, part in lower(model).placed_parts():
        whole, cut = Shard(1, 4096), Shard(1, 4096, tensor=2)
        assert part.saved_bytes(whole, "none") / 2 <= part.saved_bytes(cut, "none") * 1.0001
        assert part.saved_bytes(cut, "none") <= part.saved_bytes(whole, "none") * 1.0001


def test_limits_name_what_a_degree_must_divide() -> None:
    model = Model.from_data(
        {
            "vocabulary": 96,
            "width": 64,
            "layers": 1,
            "attention": {"mix": ["grouped"], "grouped": {"heads": 8, "kv_heads": 2, "head_width": 8}},
            "feed_forward": {"mix": ["experts"], "experts": {"routed": 6, "active": 2, "inner_width": 16}},
        }
    )
    limits = {(limit.axis, limit.what, limit.value) for limit in lower(model).layers[0].limits()}
    assert limits == {
        ("tp", "attention heads", 8),
        ("tp", "key-value heads", 2),
        ("ep", "routed experts", 6),
    }
