"""Convolution, norm, gated units, attention residual and the triangular solve."""

import pytest
import torch

from shipway.runtime.kernels import (
    attention_residual,
    gated_rms_norm,
    project,
    rms_norm,
    short_convolution,
    sigmoid_gate,
    situ_glu,
    swiglu,
)
from shipway.runtime.kernels.triangular import solve_unit_lower
from tests.runtime.kernels import reference
from tests.runtime.kernels.comparing import assert_all_close, assert_same_function, leaf


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("with_initial", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_convolution_equals_the_reference(taps, with_initial, packed):
    x, weight = leaf(2, 9, 3, seed=1), leaf(3, taps, seed=2)
    bounds = torch.tensor([0, 1, 3, 3, 9, 18], dtype=torch.int32) if packed else None
    documents = 5 if packed else 2
    initial = leaf(documents, taps - 1, 3, seed=3) if with_initial else None
    found = short_convolution(x, weight, bounds, initial, output_final=True)
    expected = reference.short_convolution(x, weight, bounds, initial)
    inputs = [x, weight] if initial is None else [x, weight, initial]
    assert_same_function(found, expected, inputs)


def test_a_convolution_split_with_its_tail_continues():
    x, weight = leaf(2, 9, 3), leaf(3, 4)
    whole, end = short_convolution(x, weight, output_final=True)
    first, tail = short_convolution(x[:, :2], weight, output_final=True)  # shorter than the taps
    second, last = short_convolution(x[:, 2:], weight, initial=tail, output_final=True)
    assert_all_close([torch.cat((first, second), 1), last], [whole, end], 0)


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_gated_units_equal_the_references(linear_beta):
    gate, up = leaf(5, 7, seed=1, spread=5), leaf(5, 7, seed=2, spread=30)
    found = situ_glu(gate, up, 4.0, linear_beta)
    assert_same_function([found], [reference.situ_glu(gate, up, 4.0, linear_beta)], [gate, up])
    assert_same_function([swiglu(gate, up)], [reference.swiglu(gate, up)], [gate, up])


def test_situ_is_bounded_by_the_product_of_its_caps_and_tends_to_swiglu():
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(10_000, generator=generator).mul(1e3) for _ in range(2))
    for dtype in (torch.float32, torch.bfloat16):
        assert situ_glu(gate.to(dtype), up.to(dtype)).abs().max() <= 100
    gate, up = gate.double() / 1e3, up.double() / 1e3
    torch.testing.assert_close(situ_glu(gate, up, 1e6, 1e6), swiglu(gate, up), rtol=1e-9, atol=1e-9)


def test_gated_units_keep_only_their_inputs_for_backward():
    kept = []
    gate, up = leaf(4, 4).bfloat16(), leaf(4, 4).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        situ_glu(gate, up)
    assert sum(x.nbytes for x in kept) == gate.nbytes + up.nbytes


@pytest.mark.parametrize("sources", [1, 3])
def test_attention_residual_equals_the_reference(sources):
    values = [leaf(2, 3, 5, seed=i, spread=3) for i in range(sources)]
    query, weight = leaf(5, seed=8), leaf(5, seed=9)
    found = attention_residual(values, query, weight, 1e-5)[0]
    assert_same_function(
        [found], [reference.attention_residual(values, query, weight, 1e-5)], [*values, query, weight]
    )


def test_a_zero_query_averages():
    values = [leaf(2, 3, 5, seed=i) for i in range(4)]
    found = attention_residual(values, torch.zeros(5).double(), torch.ones(5).double(), 1e-5)[0]
    torch.testing.assert_close(found, torch.stack(values).mean(0))


def test_attention_residual_weighs_bf16_sources_in_fp32():
    values = [leaf(2, 3, 64, seed=i).bfloat16() for i in range(4)]
    query, weight = leaf(64, seed=8).bfloat16(), torch.ones(64)
    found = attention_residual(values, query, weight, 1e-5)[0]
    expected = reference.attention_residual(
        [x.double() for x in values], query.double(), weight.double(), 1e-5
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


def test_rms_norm_equals_the_reference_and_normalises_bf16_in_fp32():
    x, weight = leaf(3, 4, 6, spread=5), leaf(6, seed=1)
    expected = reference.rms_norm(x, weight, 1e-5)
    assert_same_function([rms_norm(x, weight, 1e-5)], [expected], [x, weight])
    ones = torch.full((1, 256), 256.0, dtype=torch.bfloat16)  # a bf16 sum of 256 squares would stall
    assert rms_norm(ones, torch.ones(256), 1e-5).eq(1).all()


def test_a_gated_norm_equals_the_reference_and_keeps_its_inputs_alone():
    x, gate, weight = leaf(3, 4, 6, spread=5), leaf(3, 4, 6, seed=2), leaf(6, seed=1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = gated_rms_norm(x, gate, weight, 1e-5)
    expected = reference.rms_norm(x, weight, 1e-5) * torch.sigmoid(gate)
    assert_same_function([found], [expected], [x, gate, weight])
    assert sum(t.nbytes for t in kept) == 2 * x.nbytes + x.nbytes // 6 + weight.nbytes


@pytest.mark.parametrize("width", [1, 6])
def test_a_sigmoid_gate_opens_channels_or_whole_heads(width):
    x, gate = leaf(2, 3, 4, 6), leaf(2, 3, 4, width, seed=1)
    assert_same_function([sigmoid_gate(x, gate)], [x * torch.sigmoid(gate)], [x, gate])


def test_projections_of_one_input_send_back_the_sum_of_their_gradients():
    x, matrices = leaf(2, 3, 4), [leaf(4, 5, seed=i) for i in range(1, 4)]
    found = project(x, *(lambda y, m=m: y @ m for m in matrices))
    assert_same_function(found, [x @ m for m in matrices], [x, *matrices])
    (alone,) = torch.autograd.grad(project(x, torch.sin, torch.cos)[1].sum(), x)
    torch.testing.assert_close(alone, -torch.sin(x))


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_triangular_solve_reads_and_differentiates_the_strict_lower_triangle_only(size):
    a, b = leaf(3, size, size, spread=0.3), leaf(3, size, 5, seed=1)
    lower = a.tril(-1) + torch.eye(size, dtype=a.dtype)
    expected = torch.linalg.solve_triangular(lower, b, upper=False)
    assert_same_function([solve_unit_lower(a, b)], [expected], [a, b])
