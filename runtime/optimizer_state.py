"""Where an optimizer's elementwise state is kept, and how an update walks over it.

On the device each parameter's state is used in place. In host memory all of a kind lies in one block, which
is brought to the device in slices of a fixed size, whatever parameters they cut: while one slice is
updated the next is fetched and the one before goes back, on streams of their own, in two sets of buffers.
Updates are elementwise, so neither place nor slices change a bit of the result.

The update itself stays on the device: Muon's products and exchanges need it there, and AdamW's arithmetic is
hidden under the copies. Master weights stay too: they are the shards that FSDP gathers from, every
micro-batch, which is why FSDP's own CPU offload moves them over the bus as often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shipway.runtime.shards import like, local_tensor
from shipway.runtime.side_stream import Mark, SideStream, mark_here, pinned_zeros, wait_here
from shipway.schemas.capability import CAPABILITY


@dataclass(frozen=True)
class StatePiece:
    """Part of a parameter, with its state on the device."""

    index: int
    """Of the parameter."""
    state: tuple[Tensor, ...]
    """One of each kind; what is written into them is kept."""
    part: slice | None = None
    """Elements of the rank's own block that they belong to; None for all, in its shape."""

    def of(self, block: Tensor) -> Tensor:
        """The same part of another block of the parameter's shape, as a view."""
        return block if self.part is None else block.view(-1)[self.part]


class OptimizerState(Protocol):
    """State of several kinds for a list of parameters."""

    kinds: tuple[list[Tensor], ...]
    """For each kind one tensor a parameter, sharded as it is."""
    stays: ClassVar[bool]
    """Whether a piece is still in its place when the next one comes."""

    def walk(self) -> Iterator[StatePiece]:
        """All pieces, in the parameters' order; at least one of each. Go to the end of it."""
        ...


@dataclass
class OnDevice:
    """State beside the parameters."""

    kinds: tuple[list[Tensor], ...]
    stays: ClassVar[bool] = True

    def walk(self) -> Iterator[StatePiece]:
        """Each parameter whole."""
        for index, state in enumerate(zip(*self.kinds, strict=True)):
            yield StatePiece(index, tuple(local_tensor(tensor) for tensor in state))


@dataclass
class OnHost:
    """State in host memory."""

    kinds: tuple[list[Tensor], ...]
    stays: ClassVar[bool] = False
    blocks: tuple[Tensor, ...]
    """What the tensors of each kind lie in, one behind the other."""
    device: torch.device
    slice_elements: int = CAPABILITY.offload_slice_elements
    _cuts: list[list[tuple[int, slice, slice]]] = field(init=False)
    """Of each slice of the blocks: parameter, its part, and where in the slice that lies."""

    def __post_init__(self) -> None:
        self._cuts = list(cut([local_tensor(t).numel() for t in self.kinds[0]], self.slice_elements))
        self._up, self._down = SideStream(self.device), SideStream(self.device)

    def walk(self) -> Iterator[StatePiece]:
        """Slice by slice; state is whole in host memory when this ends."""
        for cuts, buffers in zip(self._cuts, self._lent(), strict=True):
            for index, part, where in cuts:
                yield StatePiece(index, tuple(buffer[where] for buffer in buffers), part)

    def _lent(self) -> Iterator[list[Tensor]]:
        """Every slice on the device, in turn, until the next is asked for."""
        count, size = len(self._cuts), min(self.slice_elements, len(self.blocks[0]))
        sets = [[torch.empty(size, dtype=b.dtype, device=self.device) for b in self.blocks] for _ in range(2)]
        free: list[Mark] = [mark_here(self.device)] * 2
        ready: list[Mark] = [None] * 2

        def pairs(number: int) -> list[tuple[Tensor, Tensor]]:
            here = [block[number * size : (number + 1) * size] for block in self.blocks]
            return [(buffer[: len(part)], part) for buffer, part in zip(sets[number % 2], here, strict=True)]

        def fetch(number: int) -> None:
            ready[number % 2] = self._up.copy(pairs(number), (free[number % 2],))

        fetch(0)
        for number in range(count):
            if number + 1 < count:
                fetch(number + 1)
            wait_here(ready[number % 2], self.device)
            yield [buffer for buffer, _ in pairs(number)]
            back = [(host, buffer) for buffer, host in pairs(number)]
            free[number % 2] = self._down.copy(back, (mark_here(self.device),))
        for mark in free:  # the buffers are let go here, and a checkpoint may read the blocks
            wait_here(mark, self.device)
            if mark is not None:
                mark.synchronize()


def cut(sizes: Sequence[int], slice_elements: int) -> Iterator[list[tuple[int, slice, slice]]]:
    """Deal parameters of so many elements out over slices: (parameter, its part, where in the slice)."""
    cuts: list[tuple[int, slice, slice]] = []
    at = 0
    for index, size in enumerate(sizes):
        done = 0
        while done < size or size == 0:
            if at == slice_elements:
                yield cuts
                cuts, at = [], 0
            taken = min(size - done, slice_elements - at)
            cuts.append((index, slice(done, done + taken), slice(at, at + taken)))
            done, at = done + taken, at + taken
            if size == 0:
                break
    if cuts:
        yield cuts


def make_state(
    parameters: Sequence[Tensor], dtypes: Sequence[torch.dtype], host: torch.device | None = None
) -> OptimizerState:
    """Zeros of each dtype for every parameter; in the memory of the host of device `host`, where given."""
    if host is None or not parameters:
        return OnDevice(tuple([like(p, dtype) for p in parameters] for dtype in dtypes))
    own = [local_tensor(p.detach()) for p in parameters]
    total = sum(block.numel() for block in own)
    blocks = tuple(pinned_zeros(total, dtype, host) for dtype in dtypes)
    return OnHost(tuple(_cut_block(block, parameters, own) for block in blocks), blocks, host)


def _cut_block(block: Tensor, parameters: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
    parts = block.split([local.numel() for local in own])
    shaped = [part.view(local.shape) for part, local in zip(parts, own, strict=True)]
    # DTensor.from_local would move them back to the mesh's device.
    return [
        DTensor(part, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else part
        for part, parameter in zip(shaped, parameters, strict=True)
    ]
