"""The slices of context-parallel ranks put together are the whole rows."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from shipway.runtime.data.batch import Batch, Images
from shipway.runtime.data.context_parallel import (
    ContextLayout,
    context_parallel_positions,
    shard_for_context_parallel,
)
from shipway.runtime.data.errors import DataError
from tests.runtime.data.streams import loader, numbered_texts

LAYOUTS = get_args(ContextLayout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_hold_every_token_and_label_once(size: int, layout: ContextLayout) -> None:
    (whole,) = loader({"a": numbered_texts(50)}, context=32, micro_batch=8).next_step()
    tokens, labels = torch.zeros_like(whole.tokens), torch.zeros_like(whole.labels)
    for rank in range(size):
        part = shard_for_context_parallel(whole, rank, size, layout)
        columns = context_parallel_positions(32, rank, size, layout)
        assert part.tokens.shape == (8, 32 // size)
        assert torch.equal(part.cu_seqlens, whole.cu_seqlens)
        tokens[:, columns], labels[:, columns] = part.tokens, part.labels
    assert torch.equal(tokens, whole.tokens)
    assert torch.equal(labels, whole.labels)


def test_zigzag_shares_causal_attention_equally() -> None:
    costs = [int((context_parallel_positions(64, rank, 4, "zigzag") + 1).sum()) for rank in range(4)]
    assert len(set(costs)) == 1


def test_contiguous_slices_are_in_rank_order() -> None:
    places = torch.cat([context_parallel_positions(64, rank, 4, "contiguous") for rank in range(4)])
    assert torch.equal(places, torch.arange(64))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_slice_finds_the_embeddings_of_its_own_image_tokens(layout: ContextLayout) -> None:
    image = 99
    tokens = torch.tensor([[1, image, image, image, 2, 3, image, 4], [image, 5, 6, 7, 8, 9, image, image]])
    embeddings = torch.arange(10, 17)
    images = Images(torch.zeros(28, 12), torch.tensor([[2, 6], [2, 2], [2, 2], [2, 4]]), image)
    batch = Batch(tokens, tokens, torch.tensor([0, 8, 16], dtype=torch.int32), images=images)
    whole = tokens.masked_scatter(tokens == image, embeddings)
    for rank in range(2):
        part = shard_for_context_parallel(batch, rank, 2, layout)
        filled = part.tokens.masked_scatter(part.tokens == image, embeddings[part.image_index])
        assert torch.equal(filled, whole[:, context_parallel_positions(8, rank, 2, layout)])


def test_a_row_that_cannot_be_cut_names_the_nearest_that_can() -> None:
    with pytest.raises(DataError, match="nearest contexts are 96 and 104"):
        context_parallel_positions(100, 0, 4, "zigzag")
