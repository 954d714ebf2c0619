"""The chunked linear cross-entropy against torch's, its gradients and its memory."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from shipway.runtime.kernels import chunk_rows, linear_cross_entropy
from tests.runtime.kernels.comparing import assert_same_function, leaf


def make_case(tokens=23, width=6, vocabulary=40, ignored=(3, 7)):
    labels = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(1))
    labels[[i for i in ignored if i < tokens]] = -100
    return leaf(tokens, width), leaf(vocabulary, width, seed=1), labels


def expected_loss(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.mT, labels, ignore_index=-100, reduction="sum")


@given(
    tokens=st.integers(1, 30),
    vocabulary=st.integers(1, 50),
    chunk=st.none() | st.integers(1, 40),
)
@settings(max_examples=25, deadline=None)
def test_equals_cross_entropy_of_whole_logits(tokens, vocabulary, chunk):
    hidden, weight, labels = make_case(tokens, vocabulary=vocabulary)
    found = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    assert_same_function([found], [expected_loss(hidden, weight, labels)], [hidden, weight])


def test_every_label_ignored_gives_zero_and_zero_gradients():
    hidden, weight, labels = make_case(4, ignored=range(4))
    loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.item() == 0
    assert all(grad.eq(0).all() for grad in torch.autograd.grad(loss, (hidden, weight)))


def test_only_the_wanted_gradients_are_formed():
    hidden, weight, labels = make_case()
    frozen = weight.detach()
    found = linear_cross_entropy(hidden, frozen, labels)
    assert_same_function([found], [expected_loss(hidden, frozen, labels)], [hidden])
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, labels).grad_fn is None


def test_sums_in_fp32_for_bf16_inputs():
    hidden, weight, labels = make_case(64, 32, 50)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*low, labels, chunk=16)
    exact = [x.detach().double().requires_grad_() for x in low]
    expected = expected_loss(*exact, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=2e-3, atol=0)
    for a, b in zip(torch.autograd.grad(loss, low), torch.autograd.grad(expected, exact), strict=True):
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_recomputation_gives_the_same_gradients():
    hidden, weight, labels = make_case()
    direct = linear_cross_entropy(hidden, weight, labels)
    again = checkpoint(linear_cross_entropy, hidden, weight, labels, use_reentrant=False)
    assert_same_function([again], [direct], [hidden, weight], 0)


def test_whole_logits_never_exist():
    """The largest tensor that any operation makes holds one chunk of logits, forward and backward."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor):
                    self.elements = max(self.elements, x.numel())
            return out

    hidden, weight, labels = make_case(128, 4, 64)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, labels, chunk=16).backward()
    assert largest.elements == 16 * 64


def test_default_chunk_makes_logits_about_as_large_as_the_hidden_states():
    for tokens, width, vocabulary in ((8192, 7168, 163840), (2048, 256, 4096)):
        rows = chunk_rows(tokens, width, vocabulary)
        assert tokens * width <= rows * vocabulary <= 2 * tokens * width


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"hidden \[N, D\]"):
        linear_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64))
