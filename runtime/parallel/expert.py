"""Expert parallel: every rank of `ep` holds some of the routed experts, and tokens travel to them.

Rows come sorted by expert, so that what goes to one rank is contiguous: counts are exchanged, then rows
with exact splits; a rank sorts what it received by expert, runs its own experts as the model does, and
the same exchange reversed brings the rows back. Shared experts run while the rows travel there.

ep folds the innermost part of dp_shard x cp x tp: its ranks hold different tokens, so that the
gradients of an expert's weights add up where the expert lives, and nothing is summed twice. What is
left of that product shards each expert by FSDP.

Letters: R rows (a token's copy for one of its experts), E experts, L their width, n = E / ep.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.kernels import Order, order_by_expert, permute
from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.exchange import exchange_rows, exchange_rows_during
from shipway.runtime.parallel.local import local_forward, shard_parameter

STACKS = ("gate", "up", "down")
"""Stacks of expert matrices [E, ...] in the generated Experts module."""


def mixtures(model: nn.Module) -> Iterator[nn.Module]:
    """Every mixture of experts in the model, those of prediction layers too."""
    return (module for module in model.modules() if hasattr(module, "experts"))


def apply_expert_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Keep this rank's experts of a model on the meta device, and send tokens to where theirs are.

    Raises Fatal when the experts don't spread evenly.
    """
    ranks = mesh.size("ep")
    if ranks == 1:
        return
    for mixture in mixtures(model):
        module = mixture.experts
        experts = module.gate.shape[0]
        if experts % ranks:
            legal = ", ".join(str(degree) for degree in range(1, experts + 1) if experts % degree == 0)
            raise Fatal(
                f"expert_parallel {ranks} does not divide the {experts} routed experts; it can be {legal}"
            )
        for name in STACKS:
            shard_parameter(module, name, mesh.axis("ep"), 0)
        meanwhile = Meanwhile(mixture) if hasattr(mixture, "shared") else None
        # Replacing the method, not the module, keeps every parameter's name.
        module.forward = partial(exchange_and_compute, module, mesh.group("ep"), meanwhile)


class Meanwhile:
    """Runs the shared experts of a mixture while tokens travel, and hands over what they gave when asked.

    The mixture asks for them after the routed ones; here they need only its input.
    """

    def __init__(self, mixture: nn.Module) -> None:
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self.compute = mixture.shared.forward
        mixture.register_forward_pre_hook(self._remember)
        mixture.shared.forward = self._hand_over

    def run(self) -> None:
        """Compute what the mixture will ask for."""
        assert self._input is not None
        self._output, self._input = self.compute(self._input), None

    def _remember(self, mixture: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._input = inputs[0]

    def _hand_over(self, x: Tensor) -> Tensor:
        assert self._output is not None
        output, self._output = self._output, None
        return output


def exchange_and_compute(
    module: nn.Module, group: dist.ProcessGroup, meanwhile: Meanwhile | None, rows: Tensor, offsets: Tensor
) -> Tensor:
    """The forward of experts: rows [R, L] sorted by expert, offsets [E] where each one's end -> [R, L].

    A rank receives the rows of its experts and no padding; one transfer to the host tells the splits.
    """
    ranks = dist.get_world_size(group)
    sent = torch.diff(offsets, prepend=offsets.new_zeros(1)).view(ranks, -1)  # [ep, n]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    sent_rows, received_rows = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    arrived = (
        exchange_rows_during(rows, sent_rows, received_rows, group, meanwhile.run)
        if meanwhile
        else exchange_rows(rows, sent_rows, received_rows, group)
    )
    order = order_of_arrivals(received)
    done = _compute(module, permute(arrived, order), order.offsets)
    back = Order(token=order.place, place=order.token, counts=order.counts, offsets=order.offsets)
    return exchange_rows(permute(done, back), received_rows, sent_rows, group)


def order_of_arrivals(received: Tensor) -> Order:
    """Order that sorts rows by expert: they arrive by source rank, then expert; received [ep, n] counts."""
    ranks, experts = received.shape
    expert = torch.arange(experts, device=received.device).repeat(ranks)
    return order_by_expert(expert.repeat_interleave(received.flatten()).unsqueeze(1), experts)


def _compute(module: nn.Module, rows: Tensor, offsets: Tensor) -> Tensor:
    if len(rows) == 0:  # one row behind all experts' ends: kernels are not asked for empty products
        return local_forward(module, F.pad(rows, (0, 0, 0, 1)), offsets)[:0]
    return local_forward(module, rows, offsets)
