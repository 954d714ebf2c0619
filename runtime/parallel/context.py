"""Context parallel: each rank holds one contiguous slice of every row, and the cores are swapped.

Short convolutions take the last inputs of the slice before. The delta rule's state passes as the affine
map of each slice: one all-gather of (transition, written), then every rank composes its initial state
(Kimi K3, arXiv 2607.24653, 5.1.2). Softmax attention gathers keys and values: the latent where no
position is mixed into it, heads otherwise. Documents may begin anywhere and cross any number of slices.

The model is given the boundaries of whole rows; what a slice makes of them is derived here. Every rank
runs the same collectives in the same order, forward and backward, whatever its documents: what a rank
does not need is masked, never left out.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.context_parallel import shard_for_context_parallel
from shipway.runtime.evaluation.scorer import Scorer, Scores
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.kernels import (
    DeltaCore,
    SoftmaxCore,
    delta_rule,
    delta_segment,
    short_convolution,
    softmax_attention,
)
from shipway.runtime.mesh import Mesh
from shipway.runtime.shards import local_tensor

QUERY_BLOCK = 2048
"""Queries that attend to earlier slices at a time, so that their mask stays small."""


def apply_context_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Swap convolutions and attention cores of every layer for those that reach over slices."""
    if mesh.size("cp") == 1:
        return
    if getattr(model, "prediction", None) is not None:
        raise Fatal(
            "context parallel cannot run multi-token prediction;"
            " plan with training.layout {context_parallel: 1}"
        )
    rows = Rows(mesh.group("cp"))
    for layer in model.layers.values():  # type: ignore[operator]
        _swap(layer.attention, rows)


def _swap(attention: nn.Module, rows: Rows) -> None:
    if isinstance(attention.core, DeltaCore):
        for name in ("q_conv", "k_conv", "v_conv"):
            convolution = getattr(attention, name, None)
            if convolution is not None:
                convolution.forward = partial(halo_convolution, convolution, rows)
        attention.core = ContextDeltaCore(attention.core, rows)
        return
    assert isinstance(attention.core, SoftmaxCore)
    parameters = list(inspect.signature(type(attention).forward).parameters)
    latent = hasattr(attention, "kv_down") and "positions" not in parameters
    attention.core = ContextSoftmaxCore(attention.core, rows, gathered=latent)
    if "positions" in parameters:
        place = parameters.index("positions") - 1
        bounds = parameters.index("cu_seqlens") - 1
        attention.register_forward_pre_hook(partial(_place_positions, rows, place, bounds), with_kwargs=True)
    if latent:
        # Nothing between the latent and the core knows of positions: gather it, not the heads made of it.
        attention.kv_down.register_forward_hook(lambda module, args, latent: rows.gather(latent))


def _place_positions(
    rows: Rows, place: int, bounds: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give an attention the positions within whole documents."""
    cu_seqlens = args[bounds] if len(args) > bounds else kwargs.get("cu_seqlens")
    positions = rows.slice(cu_seqlens, args[0]).positions
    if len(args) > place:
        return (*args[:place], positions, *args[place + 1 :]), kwargs
    return args, kwargs | {"positions": positions}


@dataclass(frozen=True)
class Slice:
    """One rank's slice [B, T] of every row, and how documents enter it."""

    cu_seqlens: Tensor
    """[n+1] int32: boundaries within the slice, of the flattened B*T tokens; every row starts a piece."""
    carried: tuple[int, ...]
    """Tokens before the slice of the document that each row's slice opens with."""
    opening: tuple[int, ...]
    """Length in the slice of that document."""
    first_piece: Tensor
    """[B] int64: number of each row's first piece."""
    tail: Tensor
    """[m] int64: flattened tokens of each row's last piece, row after row."""
    tail_cu_seqlens: Tensor
    """[B+1] int32: boundaries of those."""
    passes: Tensor
    """[ranks, B] bool: whether no document starts in a rank's slice, so that the state passes through."""
    positions: Tensor
    """[B, T] int64: position of every token within its whole document."""


def cut(cu_seqlens: Tensor, batch: int, tokens: int, rank: int, ranks: int) -> Slice:
    """What rank `rank` makes of boundaries `cu_seqlens` of whole rows; `tokens` is a slice's length."""
    device, whole = cu_seqlens.device, tokens * ranks
    if int(cu_seqlens[-1]) != batch * whole:
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, the rows have {batch * whole} tokens")
    starts: list[list[int]] = [[0] for _ in range(batch)]
    for bound in sorted(set(cu_seqlens.tolist())):
        if bound < batch * whole and bound % whole:
            starts[bound // whole].append(bound % whole)
    low, high = rank * tokens, (rank + 1) * tokens
    bounds: list[int] = []
    carried, opening, first_piece, tails, positions = [], [], [], [], []
    for row, begins in enumerate(starts):
        entering = max(start for start in begins if start <= low)
        inside = [start for start in begins if low < start < high]
        pieces = [low, *inside]
        first_piece.append(len(bounds))
        bounds += [row * tokens + start - low for start in pieces]
        carried.append(low - entering)
        opening.append((inside[0] if inside else high) - low)
        tails.append(torch.arange(row * tokens + pieces[-1] - low, (row + 1) * tokens))
        ends = [*inside, high]
        lengths = zip([entering, *inside], pieces, ends, strict=True)
        positions.append(
            torch.cat([torch.arange(first - start, end - start) for start, first, end in lengths])
        )
    bounds.append(batch * tokens)
    lengths_of_tails = torch.tensor([0, *(len(tail) for tail in tails)])
    passes = [
        [not any(r * tokens <= start < (r + 1) * tokens for start in begins) for begins in starts]
        for r in range(ranks)
    ]
    return Slice(
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device),
        carried=tuple(carried),
        opening=tuple(opening),
        first_piece=torch.tensor(first_piece, device=device),
        tail=torch.cat(tails).to(device),
        tail_cu_seqlens=lengths_of_tails.cumsum(0).to(torch.int32).to(device),
        passes=torch.tensor(passes, device=device),
        positions=torch.stack(positions).to(device),
    )


@dataclass
class Rows:
    """Slices of rows over a process group; what was derived from boundaries is kept while they live."""

    group: dist.ProcessGroup
    _cuts: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    @property
    def rank(self) -> int:
        """Which slice this rank holds."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """Slices of a row."""
        return dist.get_world_size(self.group)

    def slice(self, cu_seqlens: Tensor | None, x: Tensor) -> Slice:
        """This rank's slice, of which `x` [B, T, ...] are the tokens."""
        batch, tokens = x.shape[:2]
        if cu_seqlens is None:
            whole = tokens * self.ranks
            bounds = torch.arange(0, batch * whole + 1, whole, dtype=torch.int32, device=x.device)
            return cut(bounds, batch, tokens, self.rank, self.ranks)
        found = self._cuts.get(cu_seqlens)
        if found is None:
            found = self._cuts[cu_seqlens] = cut(cu_seqlens, batch, tokens, self.rank, self.ranks)
        return found  # type: ignore[no-any-return]

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, ...] of every rank in row order, up to the end of this rank's: [B, (rank + 1) T, ...]."""
        return self.all(x)[: self.rank + 1].transpose(0, 1).flatten(1, 2)

    def all(self, x: Tensor) -> Tensor:
        """`x` of every rank, stacked [ranks, ...]."""
        gathered: Tensor = _AllGather.apply(x, self.group)
        return gathered


class _AllGather(torch.autograd.Function):
    """Stacks a tensor over ranks; backward sums each rank's gradient where it came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ranks = dist.get_world_size(group)
        flat = x.new_empty(ranks * x.numel())
        dist.all_gather_into_tensor(flat, x.contiguous().view(-1), group=group)
        return flat.view(ranks, *x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        mine = gradient.new_empty(gradient[0].numel())
        dist.reduce_scatter_tensor(mine, gradient.contiguous().view(-1), group=ctx.group)
        return mine.view(gradient.shape[1:]), None


def sliced_scorer(score: Scorer, group: dist.ProcessGroup) -> Scorer:
    """A scorer of whole rows from one of slices; every rank of `group` must be given the same rows."""
    rows = Rows(group)

    def whole(part: Tensor) -> Tensor:
        return rows.all(part).transpose(0, 1).flatten(1)

    @torch.no_grad()
    def score_rows(batch: Batch) -> Scores:
        scores = score(shard_for_context_parallel(batch, rows.rank, rows.ranks))
        return Scores(whole(scores.loss), whole(scores.correct))

    return score_rows


def halo_convolution(
    convolution: nn.Module, rows: Rows, x: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The short convolution of a slice `x` [B, T, C], which begins with the last inputs of the one before."""
    part = rows.slice(cu_seqlens, x)
    weight = local_tensor(convolution.weight)  # type: ignore[arg-type]
    width = weight.shape[1] - 1
    if x.shape[1] < width:
        raise Fatal(f"context parallel leaves slices of {x.shape[1]} tokens, a convolution needs {width}")
    before = rows.all(x[:, -width:])[rows.rank - 1]  # of rank 0: masked
    distance = torch.arange(width, 0, -1, device=x.device)
    outside = distance > torch.tensor(part.carried, device=x.device).unsqueeze(1)  # [B, W-1]
    before = before.masked_fill(outside.unsqueeze(-1), 0)
    initial = before.new_zeros(len(part.cu_seqlens) - 1, *before.shape[1:])
    initial = initial.index_copy(0, part.first_piece, before)
    return short_convolution(x, weight, part.cu_seqlens, initial)[0]


class ContextDeltaCore(nn.Module):
    """The delta rule on a slice, from the state that the slices before it leave."""

    def __init__(self, core: DeltaCore, rows: Rows) -> None:
        super().__init__()
        self.lower_bound, self.chunk, self.rows = core.lower_bound, core.chunk, rows

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """As DeltaCore, on slices; `cu_seqlens` bounds the documents of whole rows."""
        part = self.rows.slice(cu_seqlens, q)
        options: dict[str, Any] = {"lower_bound": self.lower_bound, "chunk": self.chunk}
        tails = (x.flatten(0, 1).index_select(0, part.tail).unsqueeze(0) for x in (k, v, g, beta))
        transition, written = delta_segment(
            *tails, a_log, dt_bias, cu_seqlens=part.tail_cu_seqlens, **options
        )
        maps = self.rows.all(torch.cat((transition, written), dim=-1))  # [ranks, B, HV, K, K+V]
        entering = self._compose(maps, part)
        pieces = len(part.cu_seqlens) - 1
        initial = entering.new_zeros(pieces, *entering.shape[1:]).index_copy(0, part.first_piece, entering)
        o, _ = delta_rule(
            q, k, v, g, beta, a_log, dt_bias, cu_seqlens=part.cu_seqlens, initial_state=initial, **options
        )
        return o, None

    def _compose(self, maps: Tensor, part: Slice) -> Tensor:
        """State [B, HV, K, V] that enters this rank's slice, zero where a document begins with it."""
        key_width = maps.shape[-2]
        transitions, written = maps.split((key_width, maps.shape[-1] - key_width), dim=-1)
        state = torch.zeros_like(written[0])
        for rank in range(self.rows.rank):
            passed = transitions[rank] @ state
            state = passed.masked_fill(~part.passes[rank].view(-1, 1, 1, 1), 0) + written[rank]
        # Rank 0 needs no map, but must take part in the gather's backward.
        state = state if self.rows.rank else written[0]
        fresh = torch.tensor(part.carried, device=state.device) == 0
        return state.masked_fill(fresh.view(-1, 1, 1, 1), 0)


class ContextSoftmaxCore(nn.Module):
    """Softmax attention of a slice's queries to all keys up to its end."""

    def __init__(self, core: SoftmaxCore, rows: Rows, gathered: bool) -> None:
        super().__init__()
        self.scale, self.rows = core.scale, rows
        self.is_gathered = gathered
        """Whether keys and values come gathered, made from gathered latents."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """q [B, T, H, K]; k, v [B, T or (rank + 1) T, Hkv, ...], gathered already in the second case.

        `cu_seqlens` bounds the documents of whole rows.
        """
        part = self.rows.slice(cu_seqlens, q)
        tokens = q.shape[1]
        first = self.rows.rank * tokens
        k, v = self.gathered(k, v)
        out = softmax_attention(q, k[:, first:], v[:, first:], scale=self.scale, cu_seqlens=part.cu_seqlens)
        lines = []
        for row, (carried, opening) in enumerate(zip(part.carried, part.opening, strict=True)):
            line = out[row]
            if carried:
                start = first - carried
                reaching = self._reach(q[row, :opening], k[row, start:], v[row, start:], carried)
                line = torch.cat((reaching, line[opening:]))
            lines.append(line)
        return torch.stack(lines)

    def gathered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values up to the end of this rank's slice."""
        if self.is_gathered:
            return k, v
        both = self.rows.gather(torch.cat((k, v), dim=-1))
        k, v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
        return k, v

    def _reach(self, q: Tensor, k: Tensor, v: Tensor, carried: int) -> Tensor:
        """Queries [t, H, K] of one document that goes on, `carried` keys after its start."""
        blocks = []
        for start in range(0, len(q), QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, len(q))
            some = (x.unsqueeze(0) for x in (q[start:end], k[: carried + end], v[: carried + end]))
            blocks.append(softmax_attention(*some, scale=self.scale).squeeze(0))
        return torch.cat(blocks)
