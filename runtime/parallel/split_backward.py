"""Backward in two parts for zero-bubble schedules: input gradients at once, those of matrices later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from shipway.schemas.layout import Recompute


def is_deferred(name: str, parameter: Tensor) -> bool:
    """Whether the gradient of a parameter waits for the weight part.

    Those of matrices do, which are products of their own. Those of vectors and convolutions come out of
    the kernels that make the input's gradient, which would run a second time, and those of the loss head
    out of forward: they are taken with the input's.
    """
    return parameter.ndim > 1 and "_conv." not in name and not name.startswith("head.")


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of the input part and of the weight part; gathered ones, while FSDP has gathered them."""
    now, later = [], []
    for name, parameter in module.named_parameters():
        (later if is_deferred(name, parameter) else now).append(parameter)
    return now, later


class SplitStage(PipelineStage):
    """A stage whose weight part holds matrices alone and adds them up in the precision of reductions.

    torch's weight part ends at the parameters, past no hook of FSDP's, so that the gradients of several
    micro-batches would add up in compute precision until the next input part of the same layer.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """One part of backward; FSDP reduces nothing before the schedule's own reduction."""
        if backward_type == "full":
            whole: tuple[tuple[Tensor | None, ...], Any] = super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward
            )
            return whole
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        now, later = split_parameters(self.submod)
        if backward_type == "input":
            inputs = [*bwd_kwargs["input_values"], *now]
            return stage_backward_input(
                bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], inputs, iter(later)
            )
        return stage_backward_weight(iter(later), bwd_kwargs["param_groups"]), None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weight part of one micro-batch."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if isinstance(self.submod, FSDPModule):
            _accumulate(self.submod)


def _accumulate(module: FSDPModule) -> None:
    """What FSDP's hooks do to gradients that are not reduced yet: add them up in reduction precision."""
    for state in fully_shard.state(module)._state_ctx.all_states:  # type: ignore[attr-defined]
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def whole_backward(policy: Recompute) -> Callable[[], Callable[[], None]] | None:
    """What makes the input part run all of backward, where layers are recomputed; None where it is split.

    The weight part visits each group of weights in a run of autograd of its own, and checkpointing runs a
    layer's forward again in every one of them: split, a layer would be recomputed a dozen times.
    """
    return None if policy == "none" else lambda: _nothing_left


def _nothing_left() -> None:
    """The weight part after a whole backward."""
