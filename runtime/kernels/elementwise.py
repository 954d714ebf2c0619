"""Elementwise work as one kernel: compiled on CUDA, plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from .dispatch import is_plain

P = ParamSpec("P")
R = TypeVar("R")
MOST_FORMS = 64
"""Compiled forms of one function, by widths, dtypes and whether gradients are wanted."""


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
        with unseen():
            return _compiled(function)(*args, **kwargs)

    return run


def unseen() -> AbstractContextManager[Any]:
    """Without dispatch modes that only look for what a layer's backward needs.

    Under any mode nothing is compiled, and selective recomputation would keep products of whoever looks on.
    """
    modes = _get_current_dispatch_mode_stack()
    if modes and all(getattr(mode, "passes_over_elementwise", False) for mode in modes):
        return _disable_current_modes()
    return nullcontext()


@cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    # A form for every width, with gradients and without: beyond the limit all of them would run uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_FORMS)
    return torch.compile(function)
