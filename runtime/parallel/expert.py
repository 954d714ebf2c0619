"""Expert parallel: every rank of `ep` holds some of the routed experts, and tokens travel to them.

Rows come sorted by expert, so that what goes to one rank is contiguous: counts are exchanged, then rows
with exact splits; a rank sorts what it received by expert, runs its own experts as the model does, and
the same exchange reversed brings the rows back.

ep folds the innermost part of dp_shard x cp x tp: its ranks hold different tokens, so that the
gradients of an expert's weights add up where the expert lives, and nothing is summed twice. What is
left of that product shards each expert by FSDP.

Letters: R rows (a token's copy for one of its experts), E experts, L their width, n = E / ep.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.kernels import Order, order_by_expert, permute
from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.local import local_forward, shard_parameter

STACKS = ("gate", "up", "down")
"""Stacks of expert matrices [E, ...] in the generated Experts module."""


def expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every stack of routed experts in the model, those of prediction layers too."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "experts":
            yield module


def apply_expert_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Keep this rank's experts of a model on the meta device, and send tokens to where theirs are.

    Raises Fatal when the experts don't spread evenly.
    """
    ranks = mesh.size("ep")
    if ranks == 1:
        return
    for module in expert_modules(model):
        experts = module.gate.shape[0]
        if experts % ranks:
            legal = ", ".join(str(degree) for degree in range(1, experts + 1) if experts % degree == 0)
            raise Fatal(
                f"expert_parallel {ranks} does not divide the {experts} routed experts; it can be {legal}"
            )
        for name in STACKS:
            shard_parameter(module, name, mesh.axis("ep"), 0)
        # Replacing the method, not the module, keeps every parameter's name.
        module.forward = partial(exchange_and_compute, module, mesh.group("ep"))


def exchange_and_compute(
    module: nn.Module, group: dist.ProcessGroup, rows: Tensor, offsets: Tensor
) -> Tensor:
    """The forward of experts: rows [R, L] sorted by expert, offsets [E] where each one's end -> [R, L].

    A rank receives the rows of its experts and no padding; one transfer to the host tells the splits.
    """
    ranks = dist.get_world_size(group)
    sent = torch.diff(offsets, prepend=offsets.new_zeros(1)).view(ranks, -1)  # [ep, n]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    sent_rows, received_rows = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    arrived = exchange_rows(rows, sent_rows, received_rows, group)
    order = order_of_arrivals(received)
    done = _compute(module, permute(arrived, order), order.offsets)
    back = Order(token=order.place, place=order.token, counts=order.counts, offsets=order.offsets)
    return exchange_rows(permute(done, back), received_rows, sent_rows, group)


def order_of_arrivals(received: Tensor) -> Order:
    """Order that sorts rows by expert: they arrive by source rank, then expert; received [ep, n] counts."""
    ranks, experts = received.shape
    expert = torch.arange(experts, device=received.device).repeat(ranks)
    return order_by_expert(expert.repeat_interleave(received.flatten()).unsqueeze(1), experts)


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of rows [sum(sent), L]: `sent[r]` of them go to rank r, `received[r]` come from it."""
    return _ExchangeRows.apply(rows, sent, received, group)


class _ExchangeRows(torch.autograd.Function):
    """Its backward sends every gradient the way back: each row's once, whatever the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = (received, sent, group)
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.back), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _compute(module: nn.Module, rows: Tensor, offsets: Tensor) -> Tensor:
    if len(rows) == 0:  # one row behind all experts' ends: kernels are not asked for empty products
        return local_forward(module, F.pad(rows, (0, 0, 0, 1)), offsets)[:0]
    return local_forward(module, rows, offsets)
