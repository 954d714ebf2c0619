"""Routing, ordering by expert, and the grouped product."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.runtime.kernels import (
    grouped_mm,
    order_by_expert,
    permute,
    route,
    router_logits,
    split_product,
    unpermute,
)
from shipway.runtime.kernels.experts import _fused
from shipway.runtime.parallel.recompute import _kept_operators
from tests.runtime.kernels import reference
from tests.runtime.kernels.comparing import assert_all_close, assert_same_function, leaf


def test_router_logits_are_those_of_fp32_and_keep_the_input_as_it_came():
    x, weight = leaf(20, 24, dtype=torch.bfloat16), leaf(6, 24, seed=1, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = router_logits(x, weight)
    assert [(t.dtype, t.data_ptr()) for t in kept] == [(t.dtype, t.data_ptr()) for t in (x, weight)]
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = exact[0] @ exact[1].mT
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    direction = leaf(20, 6, seed=2, dtype=torch.float32).detach()
    grad_x, grad_weight = torch.autograd.grad(found, (x, weight), direction)
    wanted = torch.autograd.grad(expected, exact, direction.double())
    assert grad_x.dtype == torch.bfloat16
    torch.testing.assert_close(grad_x.double(), wanted[0], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(grad_weight.double(), wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exponent", [-20, 0, 20])
def test_products_of_bf16_parts_are_those_of_fp32(exponent):
    x = leaf(50, 40, dtype=torch.bfloat16).detach()
    weight = leaf(12, 40, seed=1, dtype=torch.float32).detach() * 2.0**exponent
    grad = leaf(50, 12, seed=2, dtype=torch.float32).detach()
    exact = [t.double() for t in (x, weight, grad)]
    for found, expected, bound in (
        (split_product.split_product(x, weight), exact[0] @ exact[1].mT, 1e-6),
        (split_product.gradient_of_weight(grad, x), exact[2].mT @ exact[0], 1e-6),
        (split_product.gradient_of_input(grad, weight), exact[2] @ exact[1], 2**-8),
    ):
        assert (found.double() - expected).norm() < bound * expected.norm()


def test_selective_recomputation_keeps_the_sum_of_the_parts():
    assert torch.ops.shipway.split_product.default in _kept_operators()


def test_router_logits_equal_a_linear_layer_in_float64():
    x, weight = leaf(20, 12), leaf(6, 12, seed=1)
    assert_same_function([router_logits(x, weight)], [x @ weight.mT], [x, weight])


def test_the_bias_chooses_and_never_weighs():
    logits, bias = leaf(50, 16), torch.zeros(16).double()
    bias[:3] = 10.0
    routing = route(logits, 4, bias)
    assert all({0, 1, 2} <= set(row) for row in routing.indices.tolist())
    score = logits.sigmoid().gather(1, routing.indices)
    assert_same_function([routing.weights], [score / score.sum(1, keepdim=True)], [logits])
    shifted = route(logits, 4, bias * 3)
    torch.testing.assert_close(shifted.weights.sort(1).values, routing.weights.sort(1).values)


def test_the_cutoff_is_the_best_biased_score_not_chosen():
    logits, bias = leaf(20, 12), leaf(12, seed=1).detach()
    routing = route(logits, 3, bias)
    biased = (logits.sigmoid() + bias).scatter(1, routing.indices, -torch.inf)
    torch.testing.assert_close(routing.cutoff, biased.max(1).values.detach())
    assert not routing.cutoff.requires_grad


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_scores_scale_and_renormalisation(scores):
    logits = leaf(20, 12)
    value = logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)
    plain = route(logits, 3, scores=scores, renormalize=False, scale=2.5)
    assert_same_function([plain.weights], [2.5 * value.topk(3).values], [logits])
    normal = route(logits, 3, scores=scores, scale=2.5)
    torch.testing.assert_close(normal.weights.sum(1), torch.full((20,), 2.5).double())


@pytest.mark.parametrize(("scores", "best"), [("sigmoid", 2), ("softmax", 1)])
def test_group_limited_choice_stays_in_the_best_groups(scores, best):
    logits, bias = leaf(30, 12), leaf(12, seed=1).detach() * 0.1
    routing = route(logits, 3, bias, scores=scores, groups=4, active_groups=2)
    value = (logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)) + bias
    for t in range(30):
        merit = [value[t, 3 * g : 3 * g + 3].topk(best).values.sum().item() for g in range(4)]
        allowed = sorted(range(4), key=lambda g: -merit[g])[:2]
        candidates = [e for g in allowed for e in range(3 * g, 3 * g + 3)]
        expected = sorted(candidates, key=lambda e: -value[t, e].item())[:3]
        assert routing.indices[t].tolist() == expected


def test_mixture_equals_the_reference():
    x, logits, weight = leaf(17, 5), leaf(17, 6, seed=1), leaf(6, 5, 5, seed=2)
    routing = route(logits, 2)
    order = order_by_expert(routing.indices, 6)
    found = unpermute(grouped_mm(permute(x, order), weight, order.offsets), order, routing.weights)
    expected = reference.mixture(x, routing.weights, routing.indices, weight)
    assert_same_function([found], [expected], [x, logits, weight])


def test_rows_are_sorted_by_expert_and_stable():
    order = order_by_expert(torch.tensor([[2, 0], [0, 2], [2, 3]]), 5)
    assert order.token.tolist() == [0, 1, 0, 1, 2, 2]
    assert order.counts.tolist() == [2, 0, 3, 1, 0]
    assert order.offsets.tolist() == [2, 2, 5, 6, 6]
    assert order.offsets.dtype == torch.int32
    assert order.place.tolist() == [2, 0, 1, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_product_zeroes_tail_rows_and_gives_idle_experts_zero_gradients(dtype):
    x, weight = leaf(12, 8, dtype=dtype), leaf(4, 16, 8, seed=1, dtype=dtype)
    offsets = torch.tensor([5, 5, 9, 9], dtype=torch.int32)
    out = grouped_mm(x, weight, offsets)
    expected = torch.cat((x[:5] @ weight[0].mT, x[5:9] @ weight[2].mT))
    torch.testing.assert_close(out[:9], expected)
    assert out[9:].eq(0).all()
    grad_x, grad_weight = torch.autograd.grad(out.float().square().sum(), (x, weight))
    assert grad_x[9:].eq(0).all()
    assert grad_weight[[1, 3]].eq(0).all()
    assert grad_weight[[0, 2]].abs().amax((1, 2)).gt(0).all()


def test_no_rows_at_all():
    x, weight = leaf(0, 8), leaf(3, 4, 8)
    out = grouped_mm(x, weight, torch.zeros(3, dtype=torch.int32))
    grad_x, grad_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert out.shape == (0, 4)
    assert grad_x.shape == x.shape
    assert grad_weight.eq(0).all()


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    tail=st.integers(0, 3),
    inner=st.integers(1, 9),
    outer=st.integers(1, 9),
)
@settings(max_examples=25, deadline=None)
def test_grouped_product_of_any_shape(sizes, tail, inner, outer):
    x, weight = leaf(sum(sizes) + tail, inner), leaf(len(sizes), outer, inner, seed=1)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    expert = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rows = (weight[expert] @ x[: sum(sizes), :, None]).squeeze(-1)
    expected = torch.cat((rows, x.new_zeros(tail, outer)))
    assert_same_function([grouped_mm(x, weight, offsets)], [expected], [x, weight])


def test_the_grouped_kernel_and_the_loop_agree_in_bf16(monkeypatch):
    """torch._grouped_mm runs on CPU too: the form that CUDA dispatches to, here against the loop."""
    x, weight = leaf(12, 8, dtype=torch.bfloat16), leaf(4, 16, 8, seed=1, dtype=torch.bfloat16)
    offsets = torch.tensor([5, 5, 9, 9], dtype=torch.int32)

    def run():
        out = grouped_mm(x, weight, offsets)
        return [out, *torch.autograd.grad(out.float().square().sum(), (x, weight))]

    assert not _fused(x, weight)
    loop = run()
    monkeypatch.setattr("shipway.runtime.kernels.experts.chosen", lambda *_: "torch._grouped_mm")
    assert _fused(x, weight)
    assert_all_close(run(), loop, 2**-7)
