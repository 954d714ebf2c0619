"""AdamW on local blocks (arXiv 1711.05101): elementwise, so sharding needs no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shipway.runtime.optimizer_state import OptimizerState, StatePiece, make_state
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
        for piece in self._state.walk():
            item = self.parameters[piece.index]
            parameter = piece.of(local_tensor(item.parameter))
            if parameter.numel():
                self._update(item, piece, parameter, learning_rate, step)

    def _update(
        self, item: AdamWParameter, piece: StatePiece, parameter: Tensor, learning_rate: float, step: int
    ) -> None:
        beta1, beta2 = self.options.betas
        first, second = piece.state
        if item.parameter.grad is None:
            gradient = torch.zeros_like(parameter)
        else:
            gradient = piece.of(local_tensor(item.parameter.grad).contiguous())
        # On a CPU that kernel rounds what is left of a vector otherwise: slices would not give the whole.
        if parameter.is_cuda and {parameter.dtype, first.dtype, gradient.dtype} == {torch.float32}:
            self._fused(item, (parameter, gradient, first, second), learning_rate, step)
            return
        gradient = gradient.to(first.dtype)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if item.decay:
            parameter.mul_(1 - learning_rate * self.options.weight_decay)
        denominator = (second.float() / (1 - beta2**step)).sqrt_().add_(self.options.eps)
        update = first.float() / denominator
        parameter.add_(update.to(parameter.dtype), alpha=-learning_rate / (1 - beta1**step))

    def _fused(
        self,
        item: AdamWParameter,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        learning_rate: float,
        step: int,
    ) -> None:
        """torch's kernel, which reads and writes everything once."""
        beta1, beta2 = self.options.betas
        torch._fused_adamw_(
            *([tensor] for tensor in tensors),
            [],
            [torch.tensor(float(step), device=tensors[0].device)],
            lr=learning_rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.options.weight_decay if item.decay else 0.0,
            eps=self.options.eps,
            amsgrad=False,
            maximize=False,
        )
