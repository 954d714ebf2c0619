"""Requests to stop: a signal sets a flag, all ranks agree on it at a step's end."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass
class StopRequest:
    """Whether this process was asked to stop."""

    received: signal.Signals | None = None
    _previous: dict[signal.Signals, object] = field(default_factory=dict)

    def install(self) -> None:
        """Take over the stop signals; call from the main thread."""
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    def agreed(self, control: dist.ProcessGroup) -> bool:
        """Whether any rank was asked; every rank must call it at the same point of a step."""
        flag = torch.tensor(int(self.received is not None))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=control)
        return bool(flag)
