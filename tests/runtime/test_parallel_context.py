"""Context parallel trains what one process trains, with documents that cross slices anywhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from shipway.runtime.parallel.context_softmax import balanced
from shipway.runtime.parallel.rows import cut
from shipway.schemas.layout import Layout
from tests.runtime.gradient_cases import Gradients, all_gradients, assert_same
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import SEQUENCES, SHALLOW

ROTARY: dict[str, Any] = {**SHALLOW, "multi_token_prediction": None}
ALONE = Layout(micro_batch=SEQUENCES)
CP4 = Layout(context_parallel=4, micro_batch=SEQUENCES)
CP4_HEADS = CP4.model_copy(update={"delta_context": "heads"})
CASES: dict[str, tuple[Layout, dict[str, Any], str]] = {
    "delta and latent": (CP4, SHALLOW, "hybrid"),
    "rotary latent": (CP4, ROTARY, "rotary latent"),
    "delta, rotary grouped, latent": (CP4, {"multi_token_prediction": None}, "three kinds"),
    "unbounded delta, more value heads": (CP4, SHALLOW, "older delta"),
    "full recomputation": (CP4.model_copy(update={"recompute": "full"}), SHALLOW, "hybrid"),
    "selective recomputation": (CP4.model_copy(update={"recompute": "selective"}), SHALLOW, "hybrid"),
    "exchanging heads": (CP4_HEADS, {**SHALLOW, "attention.delta.heads": 4}, "hybrid"),
    "exchanging heads, more value heads, with fsdp": (
        Layout(context_parallel=2, data_parallel_shard=2, micro_batch=4, delta_context="heads"),
        SHALLOW,
        "older delta",
    ),
    "exchanging heads, with tensor parallel": (
        Layout(context_parallel=2, tensor_parallel=2, micro_batch=8, delta_context="heads"),
        {**SHALLOW, "attention.delta.heads": 4, "vocabulary": 64},
        "hybrid",
    ),
    "auxiliary loss": (CP4, {"layers": 2}, "grouped"),
    "auxiliary loss, with tensor parallel": (
        Layout(context_parallel=2, tensor_parallel=2, micro_batch=4, micro_batches=2),
        {"layers": 2, "vocabulary": 64},
        "grouped",
    ),
    "with fsdp, accumulating": (
        Layout(context_parallel=2, data_parallel_shard=2, micro_batch=2, micro_batches=2),
        SHALLOW,
        "hybrid",
    ),
    "with replicas": (
        Layout(context_parallel=2, data_parallel_replicate=2, micro_batch=4),
        SHALLOW,
        "hybrid",
    ),
    "with experts over the same ranks": (
        Layout(context_parallel=2, data_parallel_shard=2, expert_parallel=4, micro_batch=4),
        SHALLOW,
        "hybrid",
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Gradients, Gradients]]:
    """Found by four ranks, and by one process, of every case."""
    expected = run_ranks(all_gradients, 1, [(ALONE, *rest) for _, *rest in CASES.values()])[0]
    found = run_ranks(all_gradients, 4, list(CASES.values()))[0]
    return dict(zip(CASES, zip(found, expected, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_context_parallel_trains_what_one_process_trains(
    outcomes: dict[str, tuple[Gradients, Gradients]], name: str
) -> None:
    assert_same(*outcomes[name])


def test_cut_places_every_token_in_its_whole_document() -> None:
    bounds = torch.tensor([0, 5, 12, 12, 16, 24], dtype=torch.int32)  # two rows of 12 tokens
    parts = [cut(bounds, 2, 4, rank, 3) for rank in range(3)]
    positions = torch.cat([part.positions for part in parts], dim=1)
    assert positions.tolist() == [[*range(5), *range(7)], [*range(4), *range(8)]]
    assert [part.carried for part in parts] == [(0, 0), (4, 0), (3, 4)]
    assert parts[1].cu_seqlens.tolist() == [0, 1, 4, 8]
    assert parts[0].passes.tolist() == [[False, False], [False, False], [True, True]]


def test_causal_work_is_the_same_on_every_rank() -> None:
    for ranks in (2, 3, 4, 7):
        exchanges = [balanced(rank, ranks) for rank in range(ranks)]
        work = [sum(2 * chunk + 1 for chunk in exchange.chunks) for exchange in exchanges]
        assert len(set(work)) == 1
        assert sorted(chunk for exchange in exchanges for chunk in exchange.chunks) == [*range(2 * ranks)]
        for rank, peer in itertools.product(range(ranks), repeat=2):
            assert exchanges[rank].sent[peer] == exchanges[peer].received[rank]
