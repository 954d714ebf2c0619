"""One optimizer step: micro-batches, gradients over all axes, finite guard, update, balancing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shipway.runtime.average import Average
from shipway.runtime.data.batch import Batch
from shipway.runtime.data.context_parallel import shard_for_context_parallel
from shipway.runtime.gradients import clip, gradient_norm, zero_missing
from shipway.runtime.optimizers import Optimizer
from shipway.runtime.parallel.data import reduce_replicated, replicated_parameters, set_gradient_sync
from shipway.runtime.parallel.tensor import reduce_tensor_parallel
from shipway.runtime.parallelize import ParallelModel
from shipway.runtime.qk_clip import QkClip
from shipway.runtime.routing import ExpertLoads, read_and_balance, reset_counters

LABEL_IGNORED = -100


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    """Mean over all valid tokens of the step, over the whole cluster."""
    gradient_norm: float
    """Before clipping."""
    valid_tokens: int
    token_hash: int
    """Sum of the row hashes of all data-parallel ranks, wrapped to 64 bits."""
    finite: bool
    """Whether the update was made."""
    expert_loads: ExpertLoads


@dataclass
class Trainer:
    """A model and its optimizer, advanced step by step."""

    model: ParallelModel
    optimizer: Optimizer
    gradient_clip: float | None
    qk_clip: QkClip | None = None
    average: Average | None = None
    on_gradients: Callable[[Trainer], None] | None = None
    """Told of each step when its gradients are whole and not yet clipped."""
    _parameters: tuple[nn.Parameter, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Taken now, while FSDP has the shards registered.
        self._parameters = tuple(self.model.named_parameters().values())

    def step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        on_phase: Callable[[str], None] = lambda name: None,
    ) -> StepResult:
        """Train on the micro-batches of one step; every rank must call it.

        When loss or gradient norm is not finite nothing is changed, and `finite` says so.
        `on_phase` is told what begins.
        """
        on_phase("forward and backward")
        valid_tokens, token_hash = self._count(batches)
        loss_sum = self._forward_backward(batches, valid_tokens)
        on_phase("gradients")
        norm_on_device = self._finish_gradients()
        if self.on_gradients:
            self.on_gradients(self)
        on_phase("update")
        norm = float(norm_on_device)
        loss = float(loss_sum) / max(1, valid_tokens)
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            self._update(norm, learning_rate)
            loads = read_and_balance(self.model)
        else:
            loads = {}
            self._forget()
        self._clear_gradients()
        return StepResult(loss, norm, valid_tokens, token_hash, finite, loads)

    def _count(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """Valid tokens and token hash of the step over all data-parallel ranks."""
        mesh = self.model.mesh
        valid = sum(int((batch.labels != LABEL_IGNORED).sum()) for batch in batches)
        token_hash = sum(batch.token_hash for batch in batches)
        counts = torch.tensor([valid, _signed64(token_hash)], device=mesh.device)
        mesh.all_reduce(counts, ["dp_replicate", "dp_shard"])
        return int(counts[0]), int(counts[1])

    def _forward_backward(self, batches: Sequence[Batch], valid_tokens: int) -> Tensor:
        """Accumulate gradients of the mean loss; returns the loss summed over the whole cluster."""
        mesh = self.model.mesh
        slices = [shard_for_context_parallel(b, mesh.rank("cp"), mesh.size("cp")) for b in batches]
        if self.model.pipeline:
            total = self.model.pipeline.forward_backward(slices, valid_tokens)
            return mesh.all_reduce(total, ["dp_replicate", "fsdp", "pp"])
        (model,) = self.model.parts
        total = torch.zeros((), device=mesh.device)
        for index, batch in enumerate(slices):
            set_gradient_sync(model, mesh.layout.zero, last=index == len(batches) - 1)
            on_device = batch.to(mesh.device)
            # A context-parallel rank cannot tell from its slices alone where rows begin.
            bounds = on_device.cu_seqlens if mesh.size("cp") > 1 else on_device.bounds
            loss = model(on_device.tokens, on_device.labels, bounds, **on_device.image_arguments)
            (loss / max(1, valid_tokens)).backward()
            total += loss.detach()
        return mesh.all_reduce(total, ["dp_replicate", "fsdp", "pp"])

    def _finish_gradients(self) -> Tensor:
        mesh = self.model.mesh
        zero_missing(self._parameters)
        for part in self.model.parts:
            reduce_replicated(replicated_parameters(part).values(), mesh)
        reduce_tensor_parallel(self._parameters, mesh)
        return gradient_norm(self._parameters, mesh)

    def _update(self, norm: float, learning_rate: float) -> None:
        if self.gradient_clip is not None:
            clip(self._parameters, norm, self.gradient_clip)
        self.optimizer.step(learning_rate)
        if self.qk_clip:
            self.qk_clip.clip()
        if self.average:
            self.average.update(self.optimizer.step_count)

    def _forget(self) -> None:
        reset_counters(self.model)
        if self.qk_clip:
            self.qk_clip.forget()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _signed64(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
