"""AdamW on local blocks (arXiv 1711.05101): elementwise, so sharding needs no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shipway.runtime.shards import like, local_tensor


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
    first: dict[str, Tensor] = field(init=False)
    second: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        dtype = self.options.moment_dtype
        self.first = {p.name: like(p.parameter, dtype) for p in self.parameters}
        self.second = {p.name: like(p.parameter, dtype) for p in self.parameters}

    @torch.no_grad()
    def step(self, learning_rate: float, step: int) -> None:
        """Update every parameter from its gradient; `step` counts from 1."""
        for item in self.parameters:
            parameter = local_tensor(item.parameter)
            if parameter.numel():
                self._update(item, parameter, learning_rate, step)

    def _update(self, item: AdamWParameter, parameter: Tensor, learning_rate: float, step: int) -> None:
        beta1, beta2 = self.options.betas
        first, second = local_tensor(self.first[item.name]), local_tensor(self.second[item.name])
        gradient = item.parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        gradient = local_tensor(gradient).to(first.dtype)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if item.decay:
            parameter.mul_(1 - learning_rate * self.options.weight_decay)
        denominator = (second.float() / (1 - beta2**step)).sqrt_().add_(self.options.eps)
        update = first.float() / denominator
        parameter.add_(update.to(parameter.dtype), alpha=-learning_rate / (1 - beta1**step))
