"""Elementwise work as one kernel: compiled on CUDA, plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .dispatch import is_plain

P = ParamSpec("P")
R = TypeVar("R")


def fuse(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` compiled where `dispatch` says so.

    Its tensors' first dimension may change from call to call (rows routed to an expert), the others
    are compiled in. Inside an outer torch.compile it is traced like anything else.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if torch.compiler.is_compiling() or is_plain("elementwise", tensors[0].device.type):
            return function(*args, **kwargs)
        for x in tensors:
            if x.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return _compiled(function)(*args, **kwargs)

    return run


@cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    return torch.compile(function)
