"""Routers of generated models: what they count, how they balance, and what the bias may not touch."""

from __future__ import annotations

import pytest
import torch

from shipway.schemas.model import Model
from tests.templates.generated import build, load, next_labels, tokens_of, variant

EXPERTS, ACTIVE = 64, 4
QUANTILE = {"kind": "quantile", "bins": 1000}
EXACT = {"kind": "quantile", "estimator": "exact"}


def wide(balancing: dict, **changes) -> Model:
    experts = {
        "routed": EXPERTS,
        "active": ACTIVE,
        "inner_width": 8,
        "latent_width": 16,
        "balancing": balancing,
    }
    return variant("hybrid", feed_forward__experts=experts | changes)


def skewed_router(model: Model, seed: int = 0) -> torch.nn.Module:
    """A router whose untrained weights favour a few experts by far."""
    router = load(model).Router()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.normal_(0, 0.2, generator=generator)
        router.weight[:, 0] += torch.linspace(-3, 3, EXPERTS)
        router.balance_bias.zero_()
    return router


def batch(model: Model, tokens: int, seed: int) -> torch.Tensor:
    x = torch.randn(tokens, model.width, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = 1
    return x


def overload(load: torch.Tensor) -> float:
    """Largest load over the mean, less one."""
    return (load.max() / load.double().mean()).item() - 1


@pytest.mark.parametrize("balancing", [QUANTILE, EXACT])
def test_quantile_balancing_evens_a_skewed_router_within_a_few_steps(balancing: dict) -> None:
    model = wide(balancing)
    router = skewed_router(model)
    violations = []
    for step in range(7):
        for micro_batch in range(2):
            router(batch(model, 4096, seed=10 * step + micro_batch))
        assert router.load.sum() == 2 * 4096 * ACTIVE
        violations.append(overload(router.load))
        router.update_balance(None)
    assert violations[0] > 5
    assert violations[1] < violations[0] / 10
    # what is left is the noise of a fresh batch: a few standard deviations of a load near 512
    assert max(violations[5:]) < 6 / (2 * 4096 * ACTIVE / EXPERTS) ** 0.5
    assert router.balance_bias.mean().abs() < 1e-6


def test_histogram_and_exact_quantiles_agree_to_a_bin() -> None:
    biases = []
    for balancing in (QUANTILE, EXACT):
        model = wide(balancing)
        router = skewed_router(model)
        router(batch(model, 2000, seed=1))
        router.update_balance(None)
        biases.append(router.balance_bias)
    assert (biases[0] - biases[1]).abs().max() < 2 * 2 / 1000


@pytest.mark.parametrize("balancing", [QUANTILE, EXACT, {"kind": "bias", "rate": 0.01}])
def test_ranks_that_add_their_counts_up_agree_with_one_rank_that_saw_it_all(balancing: dict) -> None:
    model = wide(balancing)
    whole, ranks = skewed_router(model), [skewed_router(model) for _ in range(2)]
    tokens = batch(model, 3000, seed=2)
    whole(tokens)
    whole.update_balance(None)
    for rank, part in zip(ranks, tokens.split((1000, 2000)), strict=True):
        rank(part)
    for router, bias in zip(ranks, run_in_step(ranks), strict=True):
        assert torch.equal(bias, whole.balance_bias)
        assert router.load.sum() == 0


def run_in_step(routers: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Update routers in threads that meet at every all-reduce, as ranks do."""
    from threading import Barrier, Thread

    barrier, shared = Barrier(len(routers)), [None] * len(routers)

    def update(rank: int) -> None:
        def all_reduce(tensor: torch.Tensor) -> None:
            shared[rank] = tensor.clone()
            barrier.wait()
            total = sum(shared)
            barrier.wait()
            tensor.copy_(total)

        routers[rank].update_balance(all_reduce)

    threads = [Thread(target=update, args=(rank,)) for rank in range(len(routers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [router.balance_bias for router in routers]


def test_sign_rule_moves_each_bias_by_its_rate() -> None:
    model = wide({"kind": "bias", "rate": 0.01})
    router = skewed_router(model)
    router(batch(model, 512, seed=0))
    load = router.load.double()
    router.update_balance(None)
    torch.testing.assert_close(router.balance_bias, 0.01 * torch.sign(load.mean() - load).float())


def test_bias_decides_who_is_chosen_and_never_how_much() -> None:
    model = wide(QUANTILE)
    router = skewed_router(model)
    x = batch(model, 256, seed=3)
    router.balance_bias.copy_(torch.linspace(4, -4, EXPERTS))  # turns the order over
    weights, chosen = router(x)
    scores = torch.sigmoid(x @ router.weight.T)
    of_chosen = scores.gather(1, chosen)
    torch.testing.assert_close(weights, of_chosen / of_chosen.sum(1, keepdim=True))
    assert not torch.equal(chosen, scores.topk(ACTIVE, 1).indices)


def test_bias_gets_no_gradient_and_scores_do() -> None:
    router = skewed_router(wide(QUANTILE))
    weights, _ = router(torch.randn(16, 32))
    weights[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0
    assert not router.balance_bias.requires_grad


@pytest.mark.parametrize("name", ["hybrid", "rotary latent", "three kinds", "all delta"])
def test_nothing_is_counted_in_evaluation(name: str) -> None:
    model = variant(name)
    built = build(model).eval()
    tokens = tokens_of(model, 2, 8)
    built(tokens, next_labels(tokens))
    assert not any(
        buffer.any() for path, buffer in built.named_buffers() if not path.endswith("balance_bias")
    )
    for module in built.modules():
        assert not getattr(module, "margins", [])


def test_counters_are_no_part_of_a_checkpoint() -> None:
    names = {name.rpartition(".")[2] for name in build(variant("hybrid")).state_dict()}
    assert "balance_bias" in names
    assert not names & {"load", "margin_histogram"}


def test_no_expert_outside_the_best_groups_is_chosen() -> None:
    model = wide({"kind": "bias"}, groups=8, active_groups=2)
    router = skewed_router(model)
    x = batch(model, 300, seed=4)
    _, chosen = router(x)
    merit = torch.sigmoid(x @ router.weight.T).unflatten(1, (8, 8)).topk(2, 2).values.sum(2)
    best = merit.topk(2, 1).indices
    assert ((chosen // 8).unsqueeze(-1) == best.unsqueeze(1)).any(-1).all()
