"""Several projections of one input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .elementwise import fuse
from .precision import widen


def project(x: Tensor, *layers: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What each of `layers` makes of `x`.

    Autograd would add what they send back to x one by one, three passes each; here all are summed in one
    kernel, in fp32.
    """
    return [layer(view) for layer, view in zip(layers, _FanOut.apply(x, len(layers)), strict=True)]


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        present = [grad for grad in grads if grad is not None]
        return (_sum(*present) if present else None), None


@fuse
def _sum(first: Tensor, *others: Tensor) -> Tensor:
    total = widen(first)
    for grad in others:
        total = total + grad
    return total.to(first.dtype)
