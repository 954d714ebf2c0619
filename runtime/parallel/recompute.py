"""Recomputation in backward: nothing, the cheap operators, or whole layers."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from shipway.schemas.layout import Recompute

MATRIX_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operators whose outputs selective recomputation keeps: they cost the most and return the least."""


def apply_recompute(model: nn.Module, policy: Recompute) -> None:
    """Make every layer run its forward again in backward, whole or all but its matrix products."""
    if policy == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if policy == "selective":
        options["context_fn"] = keep_products
    for layer in model.layers.values():
        # Replacing the method, not the module, keeps every parameter's name.
        layer.forward = partial(checkpoint, layer.forward, **options)


def keep_products() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts for forward and for recomputation, which hands back the products of forward.

    torch's own selective contexts demand that every operator come again; FSDP's hooks on modules
    inside the layer do not. These match the kept operators alone.
    """
    kept = _kept_operators()
    outputs: dict[Any, deque[Any]] = defaultdict(deque)
    return _Keep(kept, outputs), _Recall(kept, outputs)


class _Kept:
    """A tensor kept from forward."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> Tensor:
        """The tensor, provided that nothing has been written into it."""
        if self._tensor._version != self._version:
            raise RuntimeError("a product kept by selective recomputation was written into")
        return self._tensor


class _Keep(TorchDispatchMode):
    """Remembers the outputs of kept operators, in order."""

    passes_over_elementwise = True
    """No fused elementwise function holds an operator that is kept (runtime/kernels/elementwise.py)."""

    def __init__(self, kept: frozenset[Any], outputs: dict[Any, deque[Any]]) -> None:
        super().__init__()
        self._kept, self._outputs = kept, outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._kept:
            self._outputs[func].append(tree_map_only(Tensor, _Kept, out))
        return out


class _Recall(TorchDispatchMode):
    """Returns what was remembered instead of computing it; raises when it was written into since."""

    passes_over_elementwise = True

    def __init__(self, kept: frozenset[Any], outputs: dict[Any, deque[Any]]) -> None:
        super().__init__()
        self._kept, self._outputs = kept, outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._kept:
            return func(*args, **(kwargs or {}))
        return tree_map_only(_Kept, lambda kept: kept.tensor(), self._outputs[func].popleft())


def _kept_operators() -> frozenset[Any]:
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in MATRIX_PRODUCTS if hasattr(aten, name)]
    ours = ("packed_attention", "split_product")
    packets += [getattr(torch.ops.shipway, name) for name in ours if hasattr(torch.ops.shipway, name)]
    operators = (getattr(packet, overload) for packet in packets for overload in packet.overloads())
    # What writes into an argument (out=...) can't be kept: the argument would stay unwritten.
    return frozenset(operator for operator in operators if not operator._schema.is_mutable)
