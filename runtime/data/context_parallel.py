"""One rank's part of each row, for context parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.errors import DataError

ContextLayout = Literal["contiguous", "zigzag"]


def shard_for_context_parallel(
    batch: Batch, cp_rank: int, cp_size: int, layout: ContextLayout = "contiguous"
) -> Batch:
    """Rank `cp_rank`'s tokens and labels [b, T / cp_size] of every row.

    Labels were made from whole rows, so a slice's last label is the next slice's first token.
    `cu_seqlens` stays that of the whole rows: each rank needs to know where documents begin that
    reach it from before. Images stay whole; `image_index` says which of their tokens lie here.
    Raises DataError when a row cannot be cut so.
    """
    columns = context_parallel_positions(batch.tokens.size(1), cp_rank, cp_size, layout)
    columns = columns.to(batch.tokens.device)
    tokens = batch.tokens.index_select(1, columns)
    image_index = None
    if batch.images is not None and cp_size > 1:
        is_image = batch.tokens == batch.images.token
        number = (is_image.flatten().cumsum(0) - 1).view_as(is_image).index_select(1, columns)
        image_index = number[tokens == batch.images.token]
    return replace(
        batch, tokens=tokens, labels=batch.labels.index_select(1, columns), image_index=image_index
    )


def context_parallel_positions(context: int, cp_rank: int, cp_size: int, layout: ContextLayout) -> Tensor:
    """Places in the row [context / cp_size] int64 that rank `cp_rank` holds, ascending.

    contiguous: the rank's n-th of the row, as recurrent state passes from rank to rank.
    zigzag: the row is cut into 2n chunks and rank r holds chunks r and 2n-1-r, so that causal
    attention costs all ranks the same.
    """
    chunks = cp_size if layout == "contiguous" else 2 * cp_size
    if context % chunks:
        lower = context // chunks * chunks
        raise DataError(
            f"rows of {context} tokens cannot be cut into {chunks} equal chunks ({layout} context parallel"
            f" over {cp_size}); the nearest contexts are {lower or chunks} and {lower + chunks}"
        )
    size = context // chunks
    mine = [cp_rank] if layout == "contiguous" else [cp_rank, chunks - 1 - cp_rank]
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in mine])
