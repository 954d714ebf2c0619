"""AdamW on local blocks (arXiv 1711.05101): elementwise, so sharding needs no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shipway.runtime.optimizer_state import OptimizerState, make_state
from shipway.runtime.shards import local_tensor


@dataclass(frozen=True)
class AdamWOptions:
    """Hyper-parameters of AdamW."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    moment_dtype: torch.dtype


@dataclass(frozen=True)
class AdamWParameter:
    """One parameter, and whether weight decay applies to it."""

    name: str
    parameter: Tensor
    decay: bool


@dataclass
class AdamW:
    """Adam moments with bias correction and decoupled decay."""

    parameters: Sequence[AdamWParameter]
    options: AdamWOptions
    host: torch.device | None = None
    """Device whose host's memory keeps the moments; None: the parameters' own."""
    first: dict[str, Tensor] = field(init=False)
    second: dict[str, Tensor] = field(init=False)
    _state: OptimizerState = field(init=False, repr=False)

    def __post_init__(self) -> None:
        dtype, names = self.options.moment_dtype, [p.name for p in self.parameters]
        self._state = make_state([p.parameter for p in self.parameters], (dtype, dtype), self.host)
        self.first, self.second = (dict(zip(names, kind, strict=True)) for kind in self._state.kinds)

    @torch.no_grad()
    def step(self, learning_rate: float, step: int) -> None:
        """Update every parameter from its gradient; `step` counts from 1."""
        batch = _Batch(self.options, learning_rate, step)
        for piece in self._state.walk():
            item = self.parameters[piece.index]
            parameter = piece.of(local_tensor(item.parameter))
            if not parameter.numel():
                continue
            if item.parameter.grad is None:
                gradient = torch.zeros_like(parameter)
            else:
                gradient = piece.of(local_tensor(item.parameter.grad).contiguous())
            tensors = (parameter, gradient, *piece.state)
            # On a CPU that kernel rounds what is left of a vector otherwise: slices would not give the whole.
            if not parameter.is_cuda or {tensor.dtype for tensor in tensors} != {torch.float32}:
                self._update(item, *tensors, learning_rate, step)
                continue
            batch.add(item.decay, tensors)
            if not self._state.stays:
                batch.run()  # the piece's place on the device is another's next
        batch.run()

    def _update(
        self,
        item: AdamWParameter,
        parameter: Tensor,
        gradient: Tensor,
        first: Tensor,
        second: Tensor,
        learning_rate: float,
        step: int,
    ) -> None:
        beta1, beta2 = self.options.betas
        gradient = gradient.to(first.dtype)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if item.decay:
            parameter.mul_(1 - learning_rate * self.options.weight_decay)
        denominator = (second.float() / (1 - beta2**step)).sqrt_().add_(self.options.eps)
        update = first.float() / denominator
        parameter.add_(update.to(parameter.dtype), alpha=-learning_rate / (1 - beta1**step))


@dataclass
class _Batch:
    """Blocks that torch's kernel updates together: it reads and writes everything once, and a call for each
    parameter would cost the host more than it costs the device."""

    options: AdamWOptions
    learning_rate: float
    step: int
    _blocks: dict[bool, list[tuple[Tensor, ...]]] = field(default_factory=dict)

    def add(self, decay: bool, tensors: tuple[Tensor, ...]) -> None:
        """Parameter, gradient and both moments of a block."""
        self._blocks.setdefault(decay, []).append(tensors)

    def run(self) -> None:
        """Update what was added."""
        beta1, beta2 = self.options.betas
        for decay, blocks in self._blocks.items():
            step = torch.tensor(float(self.step), device=blocks[0][0].device)
            torch._fused_adamw_(
                *map(list, zip(*blocks, strict=True)),
                [],
                [step] * len(blocks),
                lr=self.learning_rate,
                beta1=beta1,
                beta2=beta2,
                weight_decay=self.options.weight_decay if decay else 0.0,
                eps=self.options.eps,
                amsgrad=False,
                maximize=False,
            )
        self._blocks.clear()
