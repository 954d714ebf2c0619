"""What test_triton runs in the interpreter: a process of its own, as Triton reads its mode once."""

import sys

import torch

from shipway.runtime.kernels import convolution_triton, residual_triton
from shipway.runtime.kernels.convolution import plain_short_convolution
from shipway.runtime.kernels.residual import plain_attention_residual
from tests.runtime.kernels.comparing import assert_same_function, leaf

TOLERANCE = 1e-4
"""The kernels add up in fp32."""


def convolution():
    for taps in (2, 3, 4):
        x, weight = leaf(2, 70, 40, dtype=torch.float32), leaf(40, taps, seed=1, dtype=torch.float32)
        found = convolution_triton.short_convolution(x, weight, None)
        assert_same_function([found], [plain_short_convolution(x, weight)[0]], [x, weight], TOLERANCE)


def packed_convolution():
    x, weight = leaf(1, 141, 64, dtype=torch.float32), leaf(64, 4, seed=1, dtype=torch.float32)
    bounds = torch.tensor([0, 1, 3, 3, 50, 64, 141], dtype=torch.int32)
    found = convolution_triton.short_convolution(x, weight, bounds)
    assert_same_function([found], [plain_short_convolution(x, weight, bounds)[0]], [x, weight], TOLERANCE)


def residual():
    for sources in (1, 3):
        values = [leaf(2, 11, 48, seed=i, dtype=torch.float32) for i in range(sources)]
        query, weight = leaf(48, seed=8, dtype=torch.float32), leaf(48, seed=9, dtype=torch.float32)
        found, _ = residual_triton.attention_residual(values, query, weight, 1e-5)
        expected = plain_attention_residual(values, query, weight, 1e-5)
        assert_same_function([found], [expected], [*values, query, weight], TOLERANCE)


def residual_twice():
    """What later readers send to the sources is added up, whether all are read again or one."""
    values = [leaf(1, 5, 32, seed=i, dtype=torch.float32) for i in range(3)]
    query, weight = leaf(32, seed=8, dtype=torch.float32), leaf(32, seed=9, dtype=torch.float32)
    first, handed = residual_triton.attention_residual(values, query, weight, 1e-5)
    second, last = residual_triton.attention_residual([*handed[:2], handed[2] + first], query, weight, 1e-5)
    expected_first = plain_attention_residual(values, query, weight, 1e-5)
    changed = [*values[:2], values[2] + expected_first]
    expected = [plain_attention_residual(changed, query, weight, 1e-5), changed[1]]
    assert_same_function([second, last[1]], expected, [*values, query, weight], TOLERANCE)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
