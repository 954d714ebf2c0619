"""The chunkwise delta rule against the recurrence, its state, its documents and its range."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.runtime.kernels import DeltaCore, delta_rule, delta_segment, delta_step
from shipway.runtime.kernels.delta import plain_delta_rule
from tests.runtime.kernels import reference
from tests.runtime.kernels.comparing import assert_all_close, gradients

BOUNDS = (-5.0, None)


def make_inputs(batch=2, tokens=37, heads=2, value_heads=2, width=6, value_width=5, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).requires_grad_()

    return [
        tensor(batch, tokens, heads, width),
        tensor(batch, tokens, heads, width),
        tensor(batch, tokens, value_heads, value_width),
        tensor(batch, tokens, value_heads, width),
        tensor(batch, tokens, value_heads),
        tensor(value_heads),
        tensor(value_heads * width),
    ]


def make_state(documents, value_heads=2, width=6, value_width=5, seed=9):
    generator = torch.Generator().manual_seed(seed)
    shape = (documents, value_heads, width, value_width)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("lower_bound", BOUNDS)
@pytest.mark.parametrize("value_heads", [2, 4])
def test_chunks_equal_the_recurrence_forward_and_backward(lower_bound, value_heads):
    inputs = make_inputs(value_heads=value_heads)
    state = make_state(2, value_heads)
    found = delta_rule(
        *inputs, lower_bound=lower_bound, chunk=32, initial_state=state, output_final_state=True
    )
    expected = reference.delta_rule(*inputs, lower_bound, initial=state)
    assert_all_close(found, expected)
    assert_all_close(gradients(found, [*inputs, state]), gradients(expected, [*inputs, state]))


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_packed_documents_equal_separate_ones_values_and_gradients(lower_bound):
    inputs = make_inputs(batch=2, tokens=40)
    bounds = torch.tensor([0, 3, 3, 37, 40, 41, 80], dtype=torch.int32)  # one empty, cuts inside chunks
    state = make_state(6)
    found = delta_rule(
        *inputs,
        lower_bound=lower_bound,
        chunk=32,
        cu_seqlens=bounds,
        initial_state=state,
        output_final_state=True,
    )
    outputs, finals = [], []
    for n, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        if start == end:
            finals.append(state[n : n + 1])
            continue
        part = [x.flatten(0, 1)[None, start:end] for x in inputs[:5]]
        out, final = delta_rule(
            *part,
            *inputs[5:],
            lower_bound=lower_bound,
            chunk=32,
            initial_state=state[n : n + 1],
            output_final_state=True,
        )
        outputs.append(out.flatten(0, 1))
        finals.append(final)
    expected = torch.cat(outputs).view_as(found[0]), torch.cat(finals)
    assert_all_close(found, expected)
    assert_all_close(gradients(found, [*inputs, state]), gradients(expected, [*inputs, state]))


def test_nothing_leaks_across_a_boundary_inside_a_chunk():
    inputs = make_inputs(batch=1, tokens=20)
    bounds = torch.tensor([0, 7, 20], dtype=torch.int32)
    out, _ = delta_rule(*inputs, lower_bound=-5.0, chunk=32, cu_seqlens=bounds)
    grads = torch.autograd.grad(out[:, 7:].square().sum(), inputs[:5])
    assert all(grad[:, :7].abs().max() == 0 for grad in grads)
    assert all(grad[:, 7:].abs().max() > 0 for grad in grads)


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_chunked_equals_recurrent_steps_and_equals_split_with_state(lower_bound):
    inputs = make_inputs()
    whole, final = delta_rule(*inputs, lower_bound=lower_bound, chunk=32, output_final_state=True)
    state, steps = torch.zeros_like(final), []
    for t in range(inputs[0].shape[1]):
        token = [x[:, t] for x in inputs[:5]]
        out, state = delta_step(*token, *inputs[5:], state, lower_bound=lower_bound)
        steps.append(out)
    assert_all_close((torch.stack(steps, 1), state), (whole, final))

    first, middle = delta_rule(
        *(x[:, :21] for x in inputs[:5]),
        *inputs[5:],
        lower_bound=lower_bound,
        chunk=32,
        output_final_state=True,
    )
    second, end = delta_rule(
        *(x[:, 21:] for x in inputs[:5]),
        *inputs[5:],
        lower_bound=lower_bound,
        chunk=16,
        initial_state=middle,
        output_final_state=True,
    )
    assert_all_close((torch.cat((first, second), 1), end), (whole, final))


@given(
    tokens=st.integers(1, 70),
    chunk=st.sampled_from([16, 32, 64]),
    batch=st.integers(1, 3),
    lower_bound=st.sampled_from(BOUNDS),
    cuts=st.lists(st.integers(0, 70), max_size=4),
)
@settings(max_examples=15, deadline=None)
def test_any_shape_and_any_boundaries(tokens, chunk, batch, lower_bound, cuts):
    inputs = [x.detach() for x in make_inputs(batch=batch, tokens=tokens, heads=1, value_heads=1, width=3)]
    inner = {row * tokens for row in range(batch)} | {cut for cut in cuts if cut < batch * tokens}
    bounds = torch.tensor([*sorted(inner), batch * tokens], dtype=torch.int32)
    found = delta_rule(
        *inputs, lower_bound=lower_bound, chunk=chunk, cu_seqlens=bounds, output_final_state=True
    )
    assert_all_close(found, reference.delta_rule(*inputs, lower_bound, bounds))


def test_a_segment_is_an_affine_map_of_its_initial_state():
    inputs = make_inputs()
    state = make_state(2)
    transition, written = delta_segment(*inputs[1:], lower_bound=-5.0, chunk=32)
    _, final = delta_rule(*inputs, lower_bound=-5.0, chunk=32, initial_state=state, output_final_state=True)
    assert_all_close([transition @ state + written], [final])


def test_the_worst_bounded_decay_stays_finite_and_right_in_fp32():
    inputs = make_inputs(batch=1, tokens=70)
    inputs = [x.detach() for x in inputs]
    inputs[3] = inputs[3] * 0 + 1e4  # the sigmoid's end: every token decays by exp(-5)
    inputs[5], inputs[6] = torch.zeros(2).double(), torch.zeros(12).double()
    expected = reference.delta_rule(*inputs, -5.0)
    single = [x.float().requires_grad_() for x in inputs]
    found = delta_rule(*single, lower_bound=-5.0, chunk=64, output_final_state=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
    assert all(grad.isfinite().all() for grad in gradients(found, single))


def test_a_bound_that_overflows_a_tile_is_refused():
    with pytest.raises(ValueError, match=r"-5\.54"):
        delta_rule(*make_inputs(), lower_bound=-5.6, chunk=64)


def test_extreme_unbounded_decay_is_exact_and_finite_in_fp32():
    """A token that forgets everything, among tokens that forget nothing."""
    inputs = [x.detach() for x in make_inputs(batch=1, tokens=40)]
    inputs[3] = torch.full_like(inputs[3], -12.0)
    inputs[3][:, ::7] = 2e4
    inputs[5], inputs[6] = torch.zeros(2).double(), torch.zeros(12).double()
    expected = reference.delta_rule(*inputs, None)
    single = [x.float().requires_grad_() for x in inputs]
    found = delta_rule(*single, lower_bound=None, chunk=32, output_final_state=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert all(grad.isfinite().all() for grad in gradients(found, single))


def test_repeated_keys_with_full_rewriting_stay_accurate_in_fp32():
    """The system of a chunk is worst conditioned when every key is the same and nothing decays."""
    inputs = [x.detach() for x in make_inputs(batch=1, tokens=64)]
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1]).contiguous()
    inputs[3] = torch.full_like(inputs[3], -30.0)
    inputs[4] = torch.full_like(inputs[4], 20.0)
    expected = reference.delta_rule(*inputs, -5.0)
    found = delta_rule(*(x.float() for x in inputs), lower_bound=-5.0, chunk=64, output_final_state=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_bf16_inputs_are_computed_in_fp32():
    inputs = [x.detach().bfloat16() for x in make_inputs()]
    out, state = delta_rule(*inputs, lower_bound=-5.0, chunk=32, output_final_state=True)
    expected, _ = reference.delta_rule(*(x.double() for x in inputs), -5.0)
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)


def test_recomputation_gives_the_same_gradients():
    inputs = make_inputs(tokens=20)
    core = DeltaCore(lower_bound=-5.0, chunk=32)
    direct = core(*inputs)[0]
    recomputed = torch.utils.checkpoint.checkpoint(lambda *x: core(*x)[0], *inputs, use_reentrant=False)
    assert_all_close(gradients([recomputed], inputs), gradients([direct], inputs), 0)


def test_memory_kept_for_backward_is_bounded_by_the_inputs():
    """No [T, T] and no token-by-token states: what is kept grows with the inputs, by a stated factor."""
    inputs = [x.detach().float().requires_grad_() for x in make_inputs(1, 256, 2, 2, 16, 16)]
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        plain_delta_rule(*inputs, lower_bound=-5.0, chunk=32)
    given_bytes = sum(x.nbytes for x in inputs[:4])
    assert sum(kept.values()) < 8 * given_bytes
