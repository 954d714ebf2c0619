"""Quantile balancing reaches even load on adversarial scores, exactly and from histograms."""

import pytest
import torch

from shipway.runtime.kernels import (
    add_margins,
    auxiliary_loss,
    expert_load,
    max_violation,
    quantile_bias,
    quantile_bias_from_histogram,
    route,
    sign_bias,
    solve_quantile_bias,
    update_quantile_bias,
    update_sign_bias,
)

EXPERTS, ACTIVE, TOKENS = 896, 16, 4096


def adversarial_logits(step, tokens=TOKENS, experts=EXPERTS):
    """A fixed skew over experts under fresh noise: the favourites get many times their share."""
    skew = torch.randn(experts, generator=torch.Generator().manual_seed(7))
    noise = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(100 + step))
    return noise + skew


def violation(bias, step):
    return max_violation(expert_load(route(adversarial_logits(step), ACTIVE, bias).indices, EXPERTS)).item()


def test_without_balancing_the_scores_are_adversarial():
    assert violation(torch.zeros(EXPERTS), 0) > 10


@pytest.mark.parametrize("estimator", ["exact", "histogram"])
def test_quantile_balancing_evens_a_fresh_batch_within_three_steps(estimator):
    bias = torch.zeros(EXPERTS)
    for step in range(3):
        routing = route(adversarial_logits(step), ACTIVE, bias)
        if estimator == "exact":
            bias = quantile_bias(routing.scores, routing.cutoff, ACTIVE)
        else:
            histogram = torch.zeros(EXPERTS, 1000, dtype=torch.int64)
            for part in (slice(0, 1500), slice(1500, None)):  # two micro-batches
                add_margins(histogram, routing.scores[part], routing.cutoff[part], bias)
            bias = quantile_bias_from_histogram(histogram, bias, ACTIVE)
    # even load is 73 tokens: sampling alone gives a largest of 896 Poisson counts about 0.42 over
    assert violation(bias, 50) < 0.6
    assert abs(bias.mean()) < 1e-6


def test_on_its_own_batch_alternation_comes_close_to_perfect_balance():
    scores = adversarial_logits(0).sigmoid()
    bias = solve_quantile_bias(scores, torch.zeros(EXPERTS), ACTIVE, 8)
    load = expert_load((scores + bias).topk(ACTIVE, dim=1).indices, EXPERTS)
    assert max_violation(load) < 0.1


def test_histogram_is_within_one_bin_of_the_exact_quantile():
    routing = route(adversarial_logits(0), ACTIVE, torch.zeros(EXPERTS))
    exact = quantile_bias(routing.scores, routing.cutoff, ACTIVE)
    histogram = torch.zeros(EXPERTS, 1000, dtype=torch.int64)
    add_margins(histogram, routing.scores, routing.cutoff, torch.zeros(EXPERTS))
    found = quantile_bias_from_histogram(histogram, torch.zeros(EXPERTS), ACTIVE)
    bin_width = 2 / 1000
    assert (found - exact).abs().max() < 2 * bin_width  # one for the quantile, one for the centring


def test_the_histogram_counts_every_valid_token_once():
    routing = route(adversarial_logits(0, 40, 8), 2, torch.linspace(-0.5, 0.5, 8))
    histogram = torch.zeros(8, 50, dtype=torch.int64)
    valid = torch.arange(40) % 4 > 0
    add_margins(histogram, routing.scores, routing.cutoff, torch.linspace(-0.5, 0.5, 8), valid)
    assert histogram.sum(1).eq(30).all()


def test_ranks_that_share_histograms_agree_with_one_that_saw_everything():
    bias = torch.linspace(-0.2, 0.2, 64)
    routing = route(adversarial_logits(0, 512, 64), 4, bias)
    whole, halves = torch.zeros(64, 100, dtype=torch.int64), torch.zeros(2, 64, 100, dtype=torch.int64)
    add_margins(whole, routing.scores, routing.cutoff, bias)
    for rank in range(2):
        part = slice(rank * 256, rank * 256 + 256)
        add_margins(halves[rank], routing.scores[part], routing.cutoff[part], bias)
    expected = quantile_bias_from_histogram(whole, bias, 4)
    mine = bias.clone()
    update_quantile_bias(mine, halves[0], 4, all_reduce=lambda x: x.add_(halves[1]))
    torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    assert halves[0].eq(0).all()


def test_an_empty_histogram_leaves_the_bias():
    bias = torch.linspace(-1, 1, 8)
    update_quantile_bias(bias, torch.zeros(8, 10, dtype=torch.int64), 2)
    torch.testing.assert_close(bias, torch.linspace(-1, 1, 8), rtol=0, atol=0)


def test_sign_rule_moves_against_the_overload():
    load = torch.tensor([10, 0, 5, 5])
    torch.testing.assert_close(sign_bias(torch.zeros(4), load, 0.1), torch.tensor([-0.1, 0.1, 0.0, 0.0]))
    bias = torch.zeros(4)
    update_sign_bias(bias, load, 0.1, all_reduce=lambda x: x.mul_(2))
    assert bias[0] < 0 < bias[1]
    assert load.eq(0).all()


def test_sign_rule_balances_slowly():
    bias = torch.zeros(EXPERTS)
    start = violation(bias, 0)
    for step in range(20):
        routing = route(adversarial_logits(step, 512), ACTIVE, bias)
        bias = sign_bias(bias, expert_load(routing.indices, EXPERTS), 0.02)
    assert violation(bias, 50) < start / 2


def test_auxiliary_loss_is_one_when_even_and_pulls_down_the_overloaded():
    even = torch.full((8, 4), 0.5)
    indices = torch.tensor([[0, 1], [2, 3]] * 4)
    assert auxiliary_loss(even, indices).item() == pytest.approx(1)
    logits = torch.zeros(8, 4, requires_grad=True)
    crowded = torch.tensor([[0, 1]] * 8)
    auxiliary_loss(logits.softmax(-1), crowded).backward()
    assert (logits.grad[:, :2] > 0).all()
    assert (logits.grad[:, 2:] < 0).all()
