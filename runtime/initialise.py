"""The same initial weights in every layout: random numbers are keyed by parameter name, not by rank.

The model's own `init_weights` says what is drawn; this says from which stream. Every random fill of
a parameter draws the whole tensor from a generator seeded by (seed, name) and keeps this rank's
block. Stacked experts are drawn one by one, so that no rank draws those it does not hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shipway.runtime.shards import block_of, local_tensor

_FILLS = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}


def initialise(model: nn.Module, seed: int, draw_on: torch.device | None = None) -> None:
    """Run `model.init_weights` with layout-independent random numbers; parameters must be materialised.

    Devices draw different numbers from one seed: `draw_on` says which draws, by default where a parameter is.
    """
    with torch.no_grad(), _NamedStreams(model, seed, draw_on):
        model.init_weights()


class _NamedStreams(TorchDispatchMode):
    """Redirects random in-place fills of parameters to streams keyed by their names."""

    def __init__(self, model: nn.Module, seed: int, draw_on: torch.device | None) -> None:
        super().__init__()
        self._seed, self._draw_on = seed, draw_on
        self._names = {
            local_tensor(parameter).data_ptr(): name
            for name, parameter in model.named_parameters()
            if local_tensor(parameter).numel()
        }
        self._fills: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _FILLS:
            return func(*args, **(kwargs or {}))
        target, *bounds = args
        local = local_tensor(target)
        if local.numel() == 0:
            return target
        name = self._names.get(local.data_ptr())
        if name is None or local.numel() != block_size(target):
            raise RuntimeError("init_weights must fill whole parameters: a view has no name of its own")
        fill = self._fills.get(name, 0)
        self._fills[name] = fill + 1

        def fill_whole(whole: Tensor, generator: torch.Generator) -> None:
            func(whole, *bounds, generator=generator)

        draw(target, fill_whole, self._seed, name, fill, self._draw_on)
        return target


def block_size(tensor: Tensor) -> int:
    """Elements of this rank's block."""
    count = 1
    for n in block_of(tensor).size:
        count *= n
    return count


def draw(
    target: Tensor,
    fill: Callable[[Tensor, torch.Generator], Any],
    seed: int,
    name: str,
    fill_index: int = 0,
    draw_on: torch.device | None = None,
) -> None:
    """Fill this rank's block of `target` as if the whole tensor had been drawn in one place."""
    local, block = local_tensor(target), block_of(target)
    device = draw_on or local.device
    if target.ndim < 3:
        whole = torch.empty(target.shape, dtype=torch.float32, device=device)
        fill(whole, _generator(device, seed, name, fill_index))
        local.copy_(whole[block.slices])
        return
    for index in range(block.size[0]):
        whole = torch.empty(target.shape[1:], dtype=torch.float32, device=device)
        fill(whole, _generator(device, seed, name, fill_index, block.offset[0] + index))
        local[index].copy_(whole[block.slices[1:]])


def _generator(device: torch.device, *key: object) -> torch.Generator:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
