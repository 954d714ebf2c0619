"""FSDP, replicas and gradient accumulation train what one process trains."""

from __future__ import annotations

import pytest
import torch

from shipway.schemas.layout import Layout
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import SEQUENCES, Outcome, train

FOUR_RANKS = {
    "fsdp 4": Layout(data_parallel_shard=4, micro_batch=2),
    "fsdp 4, accumulating": Layout(data_parallel_shard=4, micro_batch=1, micro_batches=2),
    "fsdp 4, zero 2": Layout(data_parallel_shard=4, micro_batch=1, micro_batches=2, zero=2),
    "hsdp 2 x 2": Layout(data_parallel_replicate=2, data_parallel_shard=2, micro_batch=1, micro_batches=2),
    "replicas 4": Layout(data_parallel_replicate=4, micro_batch=2),
    "full recomputation": Layout(data_parallel_shard=4, micro_batch=2, recompute="full"),
    "selective recomputation": Layout(data_parallel_shard=4, micro_batch=2, recompute="selective"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Of every layout, by name; `one process` is the reference."""
    (alone,) = run_ranks(train, 1, [Layout(micro_batch=SEQUENCES)])
    per_rank = run_ranks(train, 4, list(FOUR_RANKS.values()))
    for other in per_rank[1:]:
        for first, mine in zip(per_rank[0], other, strict=True):
            assert first.losses == mine.losses
            assert first.gradient_norms == mine.gradient_norms
    return {"one process": alone[0]} | dict(zip(FOUR_RANKS, per_rank[0], strict=True))


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_layout_trains_what_one_process_trains(outcomes: dict[str, Outcome], name: str) -> None:
    expected, found = outcomes["one process"], outcomes[name]
    assert found.losses == pytest.approx(expected.losses, rel=2e-5)
    assert found.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-3)
    for parameter, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[parameter], value, rtol=2e-3, atol=2e-4, msg=parameter)


def test_recomputation_changes_nothing(outcomes: dict[str, Outcome]) -> None:
    kept = outcomes["fsdp 4"]
    for name in ("full recomputation", "selective recomputation"):
        assert outcomes[name].losses == kept.losses
        assert outcomes[name].gradient_norms == kept.gradient_norms
