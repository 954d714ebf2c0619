"""Context parallel: each rank holds one contiguous slice of every row, and the cores are swapped.

Short convolutions take the last inputs of the slice before. The delta rule passes states or exchanges
heads (context_delta); softmax attention gathers keys and values, the latent where no position is mixed into
it, heads otherwise, and shares the causal work evenly (context_softmax). Documents may begin anywhere and
cross any number of slices; the model is given the boundaries of whole rows.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.context_parallel import shard_for_context_parallel
from shipway.runtime.evaluation.scorer import Scorer, Scores
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.kernels import DeltaCore, SoftmaxCore, short_convolution
from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.context_delta import HeadsDeltaCore, StateDeltaCore
from shipway.runtime.parallel.context_softmax import ContextSoftmaxCore
from shipway.runtime.parallel.rows import Rows
from shipway.runtime.parallel.token_collectives import sum_apart
from shipway.runtime.shards import local_tensor
from shipway.schemas.layout import DeltaContext


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
        _swap(layer.attention, rows, mesh.layout.delta_context)
        _balance_whole_rows(layer.feed_forward, rows)


def _swap(attention: nn.Module, rows: Rows, delta: DeltaContext) -> None:
    if isinstance(attention.core, DeltaCore):
        for name in ("q_conv", "k_conv", "v_conv"):
            convolution = getattr(attention, name, None)
            if convolution is not None:
                convolution.forward = partial(halo_convolution, convolution, rows)
        form = HeadsDeltaCore if delta == "heads" else StateDeltaCore
        attention.core = form(attention.core, rows)
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
        attention.kv_down.register_forward_hook(lambda module, args, latent: rows.whole(latent))


def _balance_whole_rows(feed_forward: nn.Module, rows: Rows) -> None:
    """Make the auxiliary loss of a router that of whole rows: of tensor-parallel shards, then of slices."""
    router = getattr(feed_forward, "router", None)
    if hasattr(router, "sum_shards"):
        of_slice = router.sum_shards or nn.Identity()
        router.sum_shards = lambda parts: sum_apart(of_slice(parts), rows.group)


def _place_positions(
    rows: Rows, place: int, bounds: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give an attention the positions within whole documents."""
    cu_seqlens = args[bounds] if len(args) > bounds else kwargs.get("cu_seqlens")
    counted = args[place] if len(args) > place else kwargs["positions"]  # [B, T], tp's shards joined
    positions = rows.slice(cu_seqlens, counted).positions
    if len(args) > place:
        return (*args[:place], positions, *args[place + 1 :]), kwargs
    return args, kwargs | {"positions": positions}


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
