"""Tensor parallel with sequence parallel around it (arXiv 1909.08053, 2205.05198).

Between the split matrices every rank keeps T / tp of the tokens: residual stream, norms, attention
residuals, routers and latents work on those. Before attention and gated units the tokens are gathered,
heads and inner width are split over ranks, and what the ranks' halves of the last matrix give is summed
back to shards of tokens. Embedding and loss are split over the vocabulary. Routed experts are not
divided: each rank routes its own tokens.

All that is not split is computed from a part of the tokens or of the heads, so that every such gradient
is a part of a sum over `tp`: `reduce_tensor_parallel` takes it once a step, on what FSDP has left.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shipway.runtime.kernels import positions_from
from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.data import all_layers
from shipway.runtime.parallel.local import local_forward, shard_parameter
from shipway.runtime.parallel.token_collectives import gather_tokens, sum_alike, sum_tokens
from shipway.runtime.parallel.vocabulary import embed_tokens, read_out
from shipway.runtime.shards import local_tensor

SPLIT_ROWS = {
    "delta": (
        *("q_proj", "k_proj", "v_proj", "q_conv", "k_conv", "v_conv"),
        *("decay_up", "beta_proj", "gate_proj", "gate_up"),
    ),
    "latent": ("q_proj", "q_up", "kv_up", "gate_proj"),
    "grouped": ("q_proj", "k_proj", "v_proj", "gate_proj"),
    "unit": ("gate", "up"),
}
"""Submodules whose output is split by heads or inner width: rows of weight, and bias."""
SPLIT_COLUMNS = ("output_proj", "down")
"""Submodules whose input is split: columns of weight."""
SPLIT_VECTORS = ("a_log", "dt_bias")
"""Parameters of an attention itself, split by heads."""


def apply_tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Split a model on the meta device over `tp`, in place; `support.check_layout` says what divides."""
    if mesh.size("tp") == 1:
        return
    for layer in all_layers(model).values():
        _split(layer.attention, attention_kind(layer.attention), mesh)
        unit = _gated_unit(layer.feed_forward)
        if unit is not None:
            _split(unit, "unit", mesh)
        _balance_whole_rows(layer.feed_forward, mesh)
    _split_ends(model, mesh)
    if "positions" in inspect.signature(type(model).forward).parameters:
        model.register_forward_pre_hook(partial(_give_positions, mesh.size("tp")), with_kwargs=True)


def attention_kind(attention: nn.Module) -> str:
    """Which of the three attentions a module is, by its own parts."""
    if hasattr(attention, "a_log"):
        return "delta"
    return "latent" if hasattr(attention, "kv_up") else "grouped"


def _gated_unit(feed_forward: nn.Module) -> nn.Module | None:
    """The dense unit of a feed-forward: itself, or the shared experts of a mixture, if any."""
    return getattr(feed_forward, "shared", None) if hasattr(feed_forward, "experts") else feed_forward


def _split(module: nn.Module, kind: str, mesh: Mesh) -> None:
    axis = mesh.axis("tp")
    for names, dimension in ((SPLIT_ROWS[kind], 0), (SPLIT_COLUMNS, 1)):
        for child in (getattr(module, name, None) for name in names):
            if child is not None:
                for name, _ in list(child.named_parameters(recurse=False)):
                    shard_parameter(child, name, axis, dimension)
                child.forward = partial(local_forward, child)
    for name in SPLIT_VECTORS:
        if hasattr(module, name):
            shard_parameter(module, name, axis, 0)
    module.forward = SplitForward(module, mesh.group("tp"))


class SplitForward:
    """The forward of a block that tp has split: its collectives stand around what the rank computes."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self.inside: Callable[..., Tensor] = partial(local_forward, module)
        """[B, T, D] -> this rank's part of a sum [B, T, D]; compilation replaces it."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [B, T / tp, D] -> [B, T / tp, D] through this rank's heads or inner width."""
        return sum_tokens(self.inside(gather_tokens(x, self.group), *args, **kwargs), self.group)


def _split_ends(model: nn.Module, mesh: Mesh) -> None:
    """Embedding, head and their neighbours; a pipeline stage may hold none of them."""
    axis, group = mesh.axis("tp"), mesh.group("tp")
    embed, head = getattr(model, "embed", None), getattr(model, "head", None)
    if embed is not None:
        shard_parameter(embed, "weight", axis, 0)
        embed.forward = lambda tokens: embed_tokens(local_tensor(embed.weight), tokens, group)
    if head is not None:
        shard_parameter(head, "weight", axis, 0)
        head.forward = lambda x, labels=None: read_out(local_tensor(head.weight), x, labels, group)
    elif not hasattr(model, "head") and embed is not None:  # tied
        model.read_out = lambda x, labels=None: read_out(local_tensor(embed.weight), x, labels, group)
    norms = [model.norm, *(prediction.norm for prediction in getattr(model, "prediction", None) or ())]
    for norm in norms:
        if norm is not None:
            norm.register_forward_hook(lambda module, args, x: gather_tokens(x, group))


def _balance_whole_rows(feed_forward: nn.Module, mesh: Mesh) -> None:
    """Make the auxiliary loss of a router that of whole rows."""
    router = getattr(feed_forward, "router", None)
    if hasattr(router, "sum_shards"):
        router.sum_shards = partial(sum_alike, group=mesh.group("tp"))


def _give_positions(
    ranks: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positions of all tokens, which the model would count from the shard that it sees."""
    signature = inspect.signature(type(model).forward)
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind(model, *args, **known)  # a pipeline's own arguments go past it
    if bound.arguments.get("positions") is None:
        tokens: Tensor = bound.arguments["tokens"]
        batch, length = tokens.shape[-3:-1] if tokens.is_floating_point() else tokens.shape
        whole = length * ranks if tokens.is_floating_point() else length
        bounds: Tensor | None = bound.arguments.get("cu_seqlens")
        # Stages of a pipeline are handed boundaries as [1, n].
        bounds = None if bounds is None else bounds.flatten()
        kwargs = kwargs | {"positions": positions_from(bounds, batch, whole, tokens.device)}
    return args, kwargs


def reduce_tensor_parallel(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Sum over `tp` the gradients of what is not split over it, after the step's last backward."""
    if mesh.size("tp") == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None and not is_divided(parameter):
            gradient = local_tensor(parameter.grad)
            by_dtype[gradient.dtype].append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=mesh.group("tp"))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def is_divided(parameter: Tensor) -> bool:
    """Whether a parameter is split over tp, or a routed expert, whose mesh has tp folded in."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in names or "expert_shard" in names
