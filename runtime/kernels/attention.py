"""Softmax attention, whole rows or packed documents, in forms that run anywhere.

Letters: B batch, T queries, S keys, H query heads, Hkv key and value heads, K key width, V value width.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .documents import document_lengths

SHORTEST_BUCKET = 16


def plain_softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = True, cu_seqlens: Tensor | None = None
) -> Tensor:
    """SDPA on rows, or over documents of like length; the package's interface documents the arguments."""
    if cu_seqlens is None:
        return rows_attention(q, k, v, scale=scale, causal=causal)
    batch, tokens = q.shape[:2]
    lengths = document_lengths(cu_seqlens, batch, tokens)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    outputs, source = [], torch.empty(batch * tokens, dtype=torch.int64, device=q.device)
    rows = 0
    for bucket in _buckets(lengths, causal, q.device):
        padded = [x.index_select(0, bucket.token.flatten()).unflatten(0, bucket.token.shape) for x in flat]
        outputs.append(rows_attention(*padded, scale=scale, causal=causal).flatten(0, 1))
        real = bucket.real.flatten()
        source[bucket.token.flatten()[real]] = rows + real.nonzero().squeeze(1)
        rows += real.numel()
    return torch.cat(outputs).index_select(0, source).unflatten(0, (batch, tokens))


class _Bucket(NamedTuple):
    """Documents padded to one length."""

    token: Tensor  # [documents, length] index of the flattened token, the last one repeated
    real: Tensor  # [documents, length] whether it is a token and not padding


def _buckets(lengths: list[int], causal: bool, device: torch.device) -> list[_Bucket]:
    """Group documents of like length.

    Under a causal mask what follows a document's end cannot be seen from within, so lengths are padded
    to the next power of two; otherwise only equal lengths share a bucket.
    """
    members: dict[int, list[tuple[int, int]]] = defaultdict(list)
    start = 0
    for length in lengths:
        if length:
            size = max(SHORTEST_BUCKET, 1 << (length - 1).bit_length()) if causal else length
            members[size].append((start, length))
        start += length
    buckets = []
    for size, documents in sorted(members.items()):
        first, count = torch.tensor(documents, device=device).unsqueeze(-1).unbind(1)  # [documents, 1]
        offset = torch.arange(size, device=device)
        buckets.append(_Bucket(first + offset.minimum(count - 1), offset < count))
    return buckets


def rows_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """SDPA within each row; the queries stand at the end of the keys when there are fewer."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if causal and queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    width = v.shape[-1]
    if q.device.type == "cpu" and width < k.shape[-1]:
        v = F.pad(v, (0, k.shape[-1] - width))  # the flash form wants one width
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[..., :width].transpose(1, 2)
