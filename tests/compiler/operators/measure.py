"""Measure what a piece of the generated model really does: bytes kept, FLOPs counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop


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
    """Every storage that an operation has made, as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.made[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        return result


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
    return FlopCounterMode(display=False, custom_mapping={forward: _forward_flops, backward: _backward_flops})


def _forward_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop(query, key, value)


def _backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return sdpa_backward_flop(gradient, query, key, value)
