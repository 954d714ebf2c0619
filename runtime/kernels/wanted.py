"""Which gradients a run of backward is after: zero-bubble schedules ask for inputs' and weights' apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def inner(weight: Tensor) -> Tensor:
    """A parameter behind a node of its own, without which `wanted` cannot tell whether it is asked for."""
    return weight.view_as(weight)


def wanted(ctx: Any, position: int) -> bool:
    """Whether the running backward needs the gradient of a function's tensor input."""
    node = ctx.next_functions[position][0]
    if not ctx.needs_input_grad[position] or node is None:
        return False
    if node.name() == "torch::autograd::AccumulateGrad":
        return True  # torch does not say so of leaves
    needed: bool = torch._C._will_engine_execute_node(node)
    return needed
