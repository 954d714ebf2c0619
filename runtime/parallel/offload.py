"""Inputs of recomputed layers that wait in host memory until their layer goes backward.

Each leaves on a stream of its own while layers compute, and comes back while the layer behind it goes
backward.
Two are on the device at a time: the newest two in forward, the one in use and the next in backward.

A layer's input is all that full recomputation keeps. What layers keep without it is 15 to 20 times as much:
on the way over the bus for longer than making it again takes, so that is not offered.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shipway.runtime.side_stream import Mark, SideStream, mark_here, wait_here

LEAVING = 2
"""Inputs that may be on their way out at a time."""


@dataclass(eq=False)
class _Waiting:
    """A layer's input in host memory."""

    host: Tensor
    left: Mark
    """When it is all there."""
    before: weakref.ref[_Waiting] | None
    """The input of the layer that goes backward next."""
    back: tuple[Tensor, Mark] | None = None
    """The copy that is on its way to the device, once it is."""


class HostInputs:
    """Where the layers of one model part leave their inputs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = SideStream(device), SideStream(device)
        self._leaving: deque[tuple[Tensor, Mark]] = deque()
        self._newest: weakref.ref[_Waiting] | None = None

    def begin(self) -> None:
        """A forward pass begins: nothing goes backward behind its first layer."""
        self._newest = None

    def pack(self, tensor: Tensor) -> _Waiting | Tensor:
        """Send a hidden state away; positions and boundaries of documents stay."""
        if not tensor.is_floating_point():
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
        left = self._out.copy([(host, tensor)], after=(mark_here(self._device),))
        self._leaving.append((tensor, left))
        self._let_go(LEAVING)
        waiting = _Waiting(host, left, self._newest)
        self._newest = weakref.ref(waiting)
        return waiting

    def unpack(self, kept: _Waiting | Tensor) -> Tensor:
        """The hidden state on the device again; the next one is sent for."""
        if isinstance(kept, Tensor):
            return kept
        self._let_go(0)
        (tensor, arrived), kept.back = kept.back or self._fetched(kept), None
        wait_here(arrived, self._device)
        before = kept.before() if kept.before else None
        if before is not None and before.back is None:
            before.back = self._fetched(before)
        return tensor

    def _fetched(self, kept: _Waiting) -> tuple[Tensor, Mark]:
        tensor = torch.empty_like(kept.host, device=self._device)
        return tensor, self._back.copy([(tensor, kept.host)], after=(kept.left, mark_here(self._device)))

    def _let_go(self, most: int) -> None:
        """Free the oldest on the device, all but `most`, once they have left."""
        while len(self._leaving) > most:
            wait_here(self._leaving[0][1], self._device)
            self._leaving.popleft()


def apply_offloaded_recompute(model: nn.Module, device: torch.device) -> None:
    """Make every layer run its forward again in backward, from an input that has waited in host memory.

    The input of a layer that opens a block of attention residuals stays: later layers read it as a source.
    """
    inputs = HostInputs(device)
    for index, layer in enumerate(model.layers.values()):
        stays = getattr(layer, "opens_block", False)
        # Replacing the method, not the module, keeps every parameter's name.
        layer.forward = partial(_forward, layer.forward, inputs, index == 0, stays)


def _forward(
    forward: Callable[..., Any], inputs: HostInputs, is_first: bool, stays: bool, state: Any, *rest: Any
) -> Any:
    """A layer's forward, from its hidden state or from [sources..., running sum]."""
    if is_first:
        inputs.begin()
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if stays:
        return checkpoint(forward, state, *rest, **options)
    *sources, hidden = state if isinstance(state, list) else [state]
    whole = partial(_from_parts, forward, isinstance(state, list))
    # Inside, checkpoint's own hooks are in force: these see what it keeps of the arguments.
    with saved_tensors_hooks(inputs.pack, inputs.unpack):
        return checkpoint(whole, hidden, sources, *rest, **options)


def _from_parts(
    forward: Callable[..., Any], is_list: bool, hidden: Tensor, sources: list[Tensor], *rest: Any
) -> Any:
    return forward([*sources, hidden] if is_list else hidden, *rest)
