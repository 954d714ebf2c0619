"""Decoding latent attention from its cache of latents, absorbed (DeepSeek-V2, arXiv 2405.04434, 2.1.2).

The key half of the up-projection is folded into the query and the value half into the output, so that
all heads attend over the cached latents themselves and no key or value is ever formed.
Letters: B sequences, T new tokens each, S cached tokens, H heads, R latent rank, K_n and K_r key widths
from the latent and shared by the heads, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import widen


def latent_attention_step(
    q_nope: Tensor, q_shared: Tensor, cache: Tensor, lengths: Tensor, kv_up: Tensor, *, scale: float
) -> Tensor:
    """Attention [B, T, H, V] of the last T tokens of every sequence over its cache.

    `q_nope` [B, T, H, K_n] and `q_shared` [B, T, H, K_r] (already rotated, if it is), `cache`
    [B, S, R + K_r] normalised latents and shared keys, the new tokens' own included; `lengths` [B] valid
    tokens of each row; `kv_up` [H*(K_n + V), R] the up-projection's weight. Scores and softmax in fp32.
    """
    new, heads, nope_width = q_nope.shape[1:]
    rank = kv_up.shape[1]
    up = widen(kv_up).view(heads, -1, rank)
    key_up, value_up = up[:, :nope_width], up[:, nope_width:]  # [H, K_n, R], [H, V, R]
    absorbed = torch.cat((torch.einsum("bthn,hnr->bthr", widen(q_nope), key_up), widen(q_shared)), dim=-1)
    wide = widen(cache)
    scores = torch.einsum("bthc,bsc->bhts", absorbed, wide) * scale
    last = lengths.unsqueeze(1) - new + torch.arange(new, device=cache.device)  # [B, T], own position
    seen = torch.arange(cache.shape[1], device=cache.device) <= last.unsqueeze(-1)  # [B, T, S]
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    mixed = torch.einsum("bhts,bsr->bthr", weights, wide[..., :rank])
    return torch.einsum("bthr,hvr->bthv", mixed, value_up).to(q_nope.dtype)


def gather_pages(pages: Tensor, page_table: Tensor) -> Tensor:
    """Rows [B, blocks * page, width] of a paged cache: `pages` [n, page, width], `page_table` [B, blocks]."""
    return pages[page_table].flatten(1, 2)


def write_pages(pages: Tensor, page_table: Tensor, positions: Tensor, values: Tensor) -> None:
    """Write `values` [B, T, width] of the tokens at `positions` [B, T] into `pages`, in place."""
    page = pages.shape[1]
    block = page_table.gather(1, positions // page)
    pages[block, positions % page] = values.to(pages.dtype)
