"""Measure what a piece of the generated model really does: bytes kept, FLOPs counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, addmm_flop, sdpa_backward_flop, sdpa_flop


class _Kept:
    """A saved tensor; it lives exactly as long as the autograd graph that needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that autograd keeps after `forward`, parameters left out."""
    excluded = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: list[weakref.ref[_Kept]] = []

    def pack(tensor: Tensor) -> _Kept:
        holder = _Kept(tensor.detach())
        kept.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        output = forward()
    storages = {}
    for reference in kept:
        holder = reference()
        if holder is not None:
            storage = holder.tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    del output
    return sum(size for pointer, size in storages.items() if pointer not in excluded)


class _Storages(TorchDispatchMode):
    """Every storage that an operation has made, for as long as something holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, StorageWeakRef] = {}  # a weak reference keeps an address from being reused
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self.made:
                self.given.setdefault(storage._cdata, StorageWeakRef(storage))
        result = function(*args, **kwargs)
        for storage in _storages(result):
            if storage._cdata not in self.given:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive_bytes(self) -> int:
        """Bytes of the storages that are still held."""
        return sum(size for reference, size in self.made.values() if not reference.expired())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def held_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages that `forward` has made and that are held after it.

    Sees what recomputation keeps aside too, which saved-tensor hooks do not; the output counts.
    """
    with _Storages() as storages:
        output = forward()
        gc.collect()
        held = storages.alive_bytes()
    del output
    return held


def counted_flops(forward: Callable[[], Tensor]) -> tuple[int, int]:
    """FLOPs of forward and of backward as torch counts them, causal attention as if it were whole."""
    with _counter() as counter:
        output = forward()
    ahead = counter.get_total_flops()
    with _counter() as counter:
        output.float().sum().backward()
    return ahead, counter.get_total_flops()


def _counter() -> FlopCounterMode:
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    # torch's own formulas, for operators that its registry leaves out.
    formulas = {forward: _forward_flops, backward: _backward_flops, aten.addmm_: _addmm_flops}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _addmm_flops(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    return addmm_flop(total, left, right)


def _forward_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop(query, key, value)


def _backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return sdpa_backward_flop(gradient, query, key, value)
