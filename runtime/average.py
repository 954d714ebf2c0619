"""Exponential moving average of the weights (Polyak and Juditsky, 1992), kept in fp32 beside each shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shipway.runtime.shards import like, local_tensor

SECTION = "average"
"""Section of a checkpoint that holds it, under the parameters' names."""


@dataclass
class Average:
    """average <- d average + (1 - d) weights after each update; elementwise, so any sharding serves.

    d grows to `decay` as (1 + t) / (10 + t) over the first updates t, so that an early average is not
    one of initial values.
    """

    parameters: Mapping[str, Tensor]
    decay: float
    values: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.values = {name: like(parameter, torch.float32) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take the weights in after the `updates`-th optimizer step, counted from 1."""
        decay = min(self.decay, (1 + updates) / (10 + updates)) if updates > 1 else 0.0
        for name, parameter in self.parameters.items():
            value, weight = local_tensor(self.values[name]), local_tensor(parameter)
            if value.numel():
                value.lerp_(weight.to(value.dtype), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the average; its weights come back bit for bit.

        Costs a copy of the weights' shard while it lasts, when no gradients are held.
        """
        kept = {name: local_tensor(p).detach().clone() for name, p in self.parameters.items()}
        try:
            self._fill(self.values)
            yield
        finally:
            self._fill(kept)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            local_tensor(parameter).copy_(local_tensor(values[name]))
