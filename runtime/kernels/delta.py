"""Kimi Delta Attention's recurrence, chunkwise and token by token, in plain PyTorch.

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t K^{-1/2}

(Kimi Linear, arXiv 2510.26692, Eq. 6 to 9; Kimi K3, arXiv 2607.24653, 2.1.1.) Letters: B batch, T
tokens, H query and key heads, HV value heads (a multiple of H), K key width, V value width, C chunk,
N documents, G chunks times value heads.

Within a chunk, decays between tokens are products of exp of cumulative log-decays taken from the
start of a 16-token tile, so that a bounded decay keeps every factor finite (5 * 16 = 80 < ln of the
largest fp32) and every tile is a dense product. Unbounded decay takes the differences of tokens in a
tile one pair at a time. Between tiles all exponents are negative in both forms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .documents import ChunkLayout, chunk_layout
from .precision import compute_dtype, widen
from .triangular import solve_unit_lower

TILE = 16
PAIRWISE_TILE = 4
"""Tokens in a tile of the unbounded form, whose pairs are taken one by one."""
LARGEST_EXPONENT = 88.7
"""ln of the largest finite bf16 or fp32: the most that |lower_bound| * TILE may be."""
NORM_EPS = 1e-6
"""Added to the squared norm of q and k, as fla-core does."""


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, in fp32 or float64."""
    x = widen(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def log_decay(g: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log of the decay, of the shape of `g` [..., HV, K], in fp32 or float64.

    z = g + dt_bias; bounded: lower_bound * sigmoid(exp(a_log) z); unbounded: -exp(a_log) softplus(z).
    `a_log` [HV], `dt_bias` [HV*K].
    """
    dtype = compute_dtype(g.dtype)
    heads, width = g.shape[-2:]
    rate = a_log.to(dtype).exp().view(heads, 1)
    z = g.to(dtype) + dt_bias.to(dtype).view(heads, width)
    if lower_bound is None:
        return -rate * F.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def plain_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
    chunk: int,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The chunkwise form; `delta_rule` in the package's interface documents the arguments."""
    batch, tokens, heads, width = q.shape
    value_heads = v.shape[2]
    layout = chunk_layout(cu_seqlens, batch, tokens, chunk_length(chunk, tokens, lower_bound))

    def by_head(x: Tensor) -> Tensor:  # [B, T, h, w] -> [chunks * HV, C, w]
        x = layout.split(x).transpose(1, 2)
        if x.shape[1] != value_heads:
            x = x.repeat_interleave(value_heads // heads, dim=1)
        return x.flatten(0, 1)

    chunks = _prepare(
        by_head(l2_normalize(q)) * width**-0.5,
        by_head(l2_normalize(k)),
        by_head(widen(v)),
        by_head(log_decay(g, a_log, dt_bias, lower_bound)),
        by_head(widen(beta).sigmoid().unsqueeze(-1)),
        bounded=lower_bound is not None,
    )
    output, final = _scan(chunks, layout, value_heads, initial_state)
    output = layout.join(output.unflatten(0, (-1, value_heads)).transpose(1, 2))
    return output.to(v.dtype), final if output_final_state else None


def chunk_length(chunk: int, tokens: int, lower_bound: float | None) -> int:
    """The chunk really used: a power of two, and no longer than the sequence needs.

    Raises ValueError when a tile of the bounded decay would overflow fp32.
    """
    if lower_bound is not None and -lower_bound * TILE > LARGEST_EXPONENT:
        raise ValueError(
            f"a decay bounded by {lower_bound} overflows in a tile of {TILE} tokens:"
            f" at least {-LARGEST_EXPONENT / TILE:.2f} is needed, or None for the pairwise form"
        )
    longest = 1 << (max(tokens, TILE) - 1).bit_length()
    return min(1 << (max(chunk, TILE).bit_length() - 1), longest)


class _Chunks(NamedTuple):
    """What the scan over chunks needs, for all G chunks and heads at once."""

    attention: Tensor  # [G, C, C] lower triangle of q_i exp(G_i - G_j) k_j
    queries: Tensor  # [G, C, K] q decayed from the chunk's start
    keys: Tensor  # [G, C, K] k decayed to the chunk's end
    erased: Tensor  # [G, C, K] W of the WY form
    written: Tensor  # [G, C, V] U of the WY form
    decay: Tensor  # [G, K, 1] of the whole chunk


def _prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, bounded: bool) -> _Chunks:
    """Everything within chunks: q, k, g [G, C, K], v [G, C, V], beta [G, C, 1]."""
    tile = TILE if bounded else PAIRWISE_TILE
    both = torch.stack((q.unflatten(1, (-1, tile)), k.unflatten(1, (-1, tile))), dim=2)
    k, g = both[:, :, 1], g.unflatten(1, (-1, tile))  # [G, tiles, tile, K]
    since = g.cumsum(2)  # from the tile's start, up to and with the token
    whole = since[:, :, -1]  # [G, tiles, K]
    rows = (both * since.exp().unsqueeze(2)).flatten(2, 3)  # [G, tiles, 2 tile, K]: q, then k
    if bounded:
        columns = k * (-since).exp()
        within = rows @ columns.mT
        to_end = columns * whole.exp().unsqueeze(2)
    else:
        within = checkpoint(_pairwise, both, g, use_reentrant=False)
        after = F.pad(g[:, :, 1:], (0, 0, 0, 1))  # a later token's decay: sums, never differences
        to_end = k * after.flip(2).cumsum(2).flip(2).exp()
    products, keys = _across_tiles(rows, within, to_end, whole.exp())

    before = F.pad(whole[:, :-1], (0, 0, 1, 0)).cumsum(1)  # from the chunk's start to the tile's
    from_start = (rows * before.exp().unsqueeze(2)).unflatten(2, (2, tile))
    queries, erasers = (x.flatten(1, 2) for x in from_start.unbind(2))
    attention, overlap = (x.flatten(1, 2) for x in products.unflatten(2, (2, tile)).unbind(2))
    # (I + tril(beta K K^T, -1))^{-1} beta [K, V]
    solved = solve_unit_lower(beta * overlap, beta * torch.cat((erasers, v), dim=-1))
    erased, written = solved.split((k.shape[-1], v.shape[-1]), dim=-1)
    return _Chunks(attention.tril(), queries, keys, erased, written, whole.sum(1).exp().unsqueeze(-1))


def _across_tiles(rows: Tensor, within: Tensor, to_end: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Products of every tile's rows with all tokens up to its end, [G, tiles, 2 tile, C], and the keys
    decayed to the chunk's end, [G, C, K].

    `rows` are decayed from their tile's start, `to_end` are keys decayed to their tile's end, `within`
    [G, tiles, 2 tile, tile] the products inside tiles, `decay` [G, tiles, K] that of whole tiles.
    """
    tiles, tile_length = within.shape[1], within.shape[3]
    lines, columns = [], to_end[:, 0]
    for tile in range(tiles):
        line = within[:, tile]
        if tile:
            line = torch.cat((rows[:, tile] @ columns.mT, line), dim=-1)
            columns = torch.cat((columns * decay[:, tile].unsqueeze(1), to_end[:, tile]), dim=1)
        lines.append(F.pad(line, (0, (tiles - 1 - tile) * tile_length)))
    return torch.stack(lines, dim=1), columns


def _pairwise(both: Tensor, g: Tensor) -> Tensor:
    """Products inside tiles from the log-decay of each pair of tokens: exact whatever the decay.

    `both` [G, tiles, 2, tile, K] holds q and k. The decay from j to i is summed from the tokens between
    them, never a difference of large sums.
    """
    index = torch.arange(g.shape[2], device=g.device)
    later = (index[:, None] > index).unsqueeze(-1)  # [i, j, 1]
    between = torch.where(later, g.unsqueeze(3), 0).cumsum(2)  # [G, tiles, i, j, K]
    upward = (index[:, None] < index).unsqueeze(-1)
    keys = between.masked_fill(upward, -torch.inf).exp() * both[:, :, 1].unsqueeze(2)
    return (keys @ both.permute(0, 1, 3, 4, 2)).permute(0, 1, 4, 2, 3).flatten(2, 3)


def _scan(chunks: _Chunks, layout: ChunkLayout, heads: int, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Carry the state over chunks; outputs [G, C, V] and the final states [N, HV, K, V]."""
    sizes = [documents * heads for documents in layout.running]
    documents = len(layout.order)
    width, value_width = chunks.keys.shape[-1], chunks.written.shape[-1]
    order = torch.tensor(layout.order, device=chunks.keys.device)
    if initial is None:
        state = chunks.keys.new_zeros(documents * heads, width, value_width)
    else:
        state = initial.to(chunks.keys.dtype)[order].flatten(0, 1)
    states, values, finished = [], [], []
    pieces = (x.split(sizes) for x in (chunks.keys.mT, chunks.erased, chunks.written, chunks.decay))
    for size, keys, erased, written, decay in zip(sizes, *pieces, strict=True):
        finished.append(state[size:])
        state = state[:size]
        value = torch.baddbmm(written, erased, state, alpha=-1)
        states.append(state)
        values.append(value)
        state = torch.baddbmm(decay * state, keys, value)
    finished.append(state)
    final = torch.cat(finished[::-1]).unflatten(0, (documents, heads))[torch.argsort(order)]
    if not states:
        return chunks.written, final
    output = torch.baddbmm(chunks.queries @ torch.cat(states), chunks.attention, torch.cat(values))
    return output, final


def plain_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    """One token of every sequence: q, k [B, H, K], v [B, HV, V], g [B, HV, K], beta [B, HV],
    state [B, HV, K, V]; returns o [B, HV, V] and the new state."""
    share = v.shape[1] // q.shape[1]
    q = l2_normalize(q).repeat_interleave(share, dim=1) * q.shape[-1] ** -0.5
    k = l2_normalize(k).repeat_interleave(share, dim=1)
    state = state.to(q.dtype) * log_decay(g, a_log, dt_bias, lower_bound).exp().unsqueeze(-1)
    recalled = (k.unsqueeze(-2) @ state).squeeze(-2)
    change = widen(beta).sigmoid().unsqueeze(-1) * (widen(v) - recalled)
    state = state + k.unsqueeze(-1) * change.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2).to(v.dtype), state
