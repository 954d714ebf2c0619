"""Softmax attention, its documents, the absorbed decode and the rotary positions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.runtime.kernels import (
    Yarn,
    frequencies,
    gather_pages,
    latent_attention_step,
    positions_from,
    rotary,
    softmax_attention,
    write_pages,
)
from tests.runtime.kernels import reference
from tests.runtime.kernels.comparing import assert_all_close, assert_same_function, leaf


def make_qkv(batch=2, tokens=21, heads=4, shared=2, width=6, value_width=4, keys=None):
    keys = keys or tokens
    return [
        leaf(batch, tokens, heads, width, seed=1),
        leaf(batch, keys, shared, width, seed=2),
        leaf(batch, keys, shared, value_width, seed=3),
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("width", "value_width"), [(6, 4), (4, 6), (4, 4)])
def test_rows_equal_the_reference(causal, width, value_width):
    inputs = make_qkv(width=width, value_width=value_width)
    found = softmax_attention(*inputs, scale=0.4, causal=causal)
    assert_same_function([found], [reference.softmax_attention(*inputs, 0.4, causal)], inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_equal_the_reference(causal):
    inputs = make_qkv()
    bounds = torch.tensor([0, 1, 1, 18, 21, 29, 42], dtype=torch.int32)
    found = softmax_attention(*inputs, scale=0.4, causal=causal, cu_seqlens=bounds)
    expected = reference.softmax_attention(*inputs, 0.4, causal, bounds)
    assert_same_function([found], [expected], inputs)


def test_fewer_queries_are_the_last_of_the_keys():
    inputs = make_qkv(tokens=3, keys=8)
    found = softmax_attention(*inputs, scale=0.4)
    assert_same_function([found], [reference.softmax_attention(*inputs, 0.4, True)], inputs)


@given(cuts=st.lists(st.integers(1, 39), max_size=5), causal=st.booleans())
@settings(max_examples=15, deadline=None)
def test_any_boundaries(cuts, causal):
    inputs = [x.detach() for x in make_qkv(tokens=20, heads=1, shared=1)]
    bounds = torch.tensor(sorted({0, 20, 40, *cuts}), dtype=torch.int32)
    found = softmax_attention(*inputs, scale=0.4, causal=causal, cu_seqlens=bounds)
    assert_all_close([found], [reference.softmax_attention(*inputs, 0.4, causal, bounds)])


def test_boundaries_that_do_not_span_the_batch_are_refused():
    with pytest.raises(ValueError, match="must rise from 0 to 42"):
        softmax_attention(*make_qkv(), scale=1.0, cu_seqlens=torch.tensor([0, 30]))


def test_absorbed_decode_equals_attention_over_formed_keys():
    nope, shared = leaf(2, 2, 3, 4, seed=1), leaf(2, 2, 3, 2, seed=2)
    cache, up = leaf(2, 9, 5 + 2, seed=3), leaf(3 * (4 + 6), 5, seed=4)
    lengths = torch.tensor([9, 4])
    found = latent_attention_step(nope, shared, cache, lengths, up, scale=0.3)
    for row in range(2):
        expected = reference.latent_attention(nope[row], shared[row], cache[row], int(lengths[row]), up, 0.3)
        assert_all_close([found[row]], [expected])


def test_a_paged_cache_gives_back_what_was_written():
    pages = torch.zeros(6, 4, 3)
    table = torch.tensor([[5, 0, 3], [1, 4, 2]])
    values = torch.randn(2, 7, 3)
    positions = torch.arange(2, 9).expand(2, 7)  # across three pages
    write_pages(pages, table, positions, values)
    torch.testing.assert_close(gather_pages(pages, table)[:, 2:9], values)
    assert gather_pages(pages, table)[:, :2].abs().max() == 0


def test_positions_restart_with_every_document():
    bounds = torch.tensor([0, 3, 4, 4, 10], dtype=torch.int32)
    assert positions_from(bounds, 2, 5).tolist() == [[0, 1, 2, 0, 0], [1, 2, 3, 4, 5]]
    assert positions_from(None, 2, 3).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_rotary_is_a_rotation_by_position():
    x, positions = leaf(2, 5, 3, 8), torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 7, 1000]])
    expected = reference.rotary(x, positions, 100.0)
    assert_same_function([rotary(x, positions, 100.0)], [expected], [x])
    pairs = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # (i, i + R/2) laid out as (2i, 2i + 1)
    assert_all_close([rotary(x[..., pairs], positions, 100.0, interleaved=True)], [expected[..., pairs]])


def test_rotary_is_right_at_a_million_tokens_in_bf16_and_fp32():
    """Angles are formed in float64: in fp32 the position 10^6 would turn by a wrong angle."""
    x = torch.ones(1, 1, 1, 2)
    position = torch.tensor([[1_000_003]])
    found = rotary(x, position, 1e4)
    angle = math.fmod(1_000_003, 2 * math.pi)
    expected = [math.cos(angle) - math.sin(angle), math.cos(angle) + math.sin(angle)]
    torch.testing.assert_close(found.flatten(), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_yarn_keeps_fast_channels_and_slows_slow_ones_by_the_factor():
    yarn = Yarn(factor=40.0, original_context=4096)
    plain, extended = frequencies(64, 1e4), frequencies(64, 1e4, yarn)
    turns = 4096 * plain / (2 * math.pi)
    torch.testing.assert_close(extended[turns > 50], plain[turns > 50])
    torch.testing.assert_close(extended[turns < 0.7], plain[turns < 0.7] / 40)
    assert (extended.diff() < 0).all()
    # DeepSeek-V3: factor 40, mscale 1: (0.1 ln 40 + 1)^2
    assert yarn.softmax_factor == pytest.approx(1.8738, abs=1e-4)
