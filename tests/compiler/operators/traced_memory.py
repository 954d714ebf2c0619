"""Bytes alive through forward, recomputation and backward of a generated model, as its CUDA kernels have it.

The model runs on fake tensors, so that any dimensions cost nothing. The dispatch of kernels is that of a
CUDA device; kernels that are not PyTorch's stand in as functions that keep and make the same tensors in the
same order (`kernel_stand_ins`). What a compiled elementwise function makes inside itself is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shipway.runtime import kernels
from shipway.runtime.kernels import dispatch, elementwise, split_product
from shipway.runtime.parallel import recompute
from tests.compiler.operators import kernel_stand_ins


class Alive(TorchDispatchMode):
    """Counts bytes of the storages that operations have made, as long as something holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, StorageWeakRef] = {}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0
        self.inside = False
        self.log: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.inside:
            for storage in _storages((args, kwargs)):
                if storage._cdata not in self.made:
                    self.given.setdefault(storage._cdata, StorageWeakRef(storage))
        result = function(*args, **kwargs)
        if not self.inside:
            # Autograd adds gradients up in place where tensors are real (input_buffer.cpp).
            added = function is torch.ops.aten.add.Tensor and not torch.is_grad_enabled()
            self.count(result, str(function), result.nbytes if added else 0)
        return result

    def count(self, result: Any, name: str = "", less: int = 0) -> None:
        """Take in what an operation has made, and look at what is alive now."""
        for storage in _storages(result):
            if storage._cdata not in self.given and storage._cdata not in self.made:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        now = self.now() - less
        self.log.append((name, now))
        self.peak_bytes = max(self.peak_bytes, now)

    def now(self) -> int:
        """Bytes alive."""
        for key in [key for key, (reference, _) in self.made.items() if reference.expired()]:
            del self.made[key]
        return sum(size for _, size in self.made.values())

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """What is made here never counts."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as one kernel: what it makes and drops inside does not count."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self.inside = False
            self.count(result, function.__name__)
            return result

        return run


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def tracing(patch: Any) -> Iterator[Alive]:
    """Fake tensors on the CPU under the kernels of a CUDA device."""
    alive = Alive()
    fast = {f.operation: dispatch.Choice(f.operation, f.implementation, "traced") for f in dispatch.FAST}
    patch.setattr(dispatch, "_choices", lambda device: fast)
    patch.setattr(elementwise, "_compiled", alive.opaque)
    patch.setattr(split_product, "_product", alive.opaque(split_product._product))
    kept = recompute._kept_operators() | {kernel_stand_ins.attention_forward}
    patch.setattr(recompute, "_kept_operators", lambda: kept)
    patch.setitem(sys.modules, "shipway.runtime.kernels.cuda", kernel_stand_ins)
    patch.setattr(kernels, "cuda", kernel_stand_ins, raising=False)
    patch.setitem(sys.modules, "shipway.runtime.kernels.residual_triton", kernel_stand_ins)
    patch.setattr(kernels, "residual_triton", kernel_stand_ins, raising=False)
    patch.setattr(sys.modules["shipway.runtime.kernels.rotary"], "_rotate", kernel_stand_ins.rotate)
    with FakeTensorMode(allow_non_fake_inputs=True), alive:
        yield alive
