"""Copies between host and device beside the work of the current stream, and marks to wait for.

Without CUDA there is nothing beside: copies are made at once, by the same calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shipway.runtime.exit_codes import Fatal

Mark = torch.cuda.Event | None
"""A point in a stream's work; None is behind everything."""


class SideStream:
    """A stream of copies in one direction."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Mark] = ()) -> Mark:
        """Copy sources into targets, given as (target, source), once all of `after` is reached.

        Whoever uses or frees either must wait for the mark that is returned.
        """
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        for mark in after:
            if mark is not None:
                self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()


def mark_here(device: torch.device) -> Mark:
    """The end of what the current stream has been given."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_here(mark: Mark, device: torch.device) -> None:
    """Let the current stream go on only behind a mark."""
    if mark is not None:
        torch.cuda.current_stream(device).wait_event(mark)


def pinned_zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that `device` copies from and to without staging; ordinary memory without CUDA.

    Registered with the driver in place: torch's allocator of pinned memory rounds up to powers of two.
    Raises Fatal when the driver refuses.
    """
    memory = torch.zeros(elements, dtype=dtype)
    if device.type == "cuda" and elements:
        address, size = memory.data_ptr(), memory.nbytes
        if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
            raise Fatal(
                f"{size / 2**30:.1f} GiB of host memory cannot be pinned for offloaded state: raise the"
                " container's memory limit (and `ulimit -l`), or plan with training.layout {offload: none}"
            )
        weakref.finalize(memory, _unregister, address).atexit = False
    return memory


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
