"""Requests to stop, or for a profile: a signal sets a flag, all ranks agree on it at a step's end."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PROFILE_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Agreement:
    """What all ranks know at a step's end."""

    stop: bool
    """Some rank was asked to stop."""
    profile_steps: int
    """The most steps that any rank was asked to profile."""
    save_failed: bool
    """A save in the background has failed on some rank."""


@dataclass
class StopRequest:
    """Whether this process was asked to stop."""

    received: signal.Signals | None = None
    profile: bool = False
    """Whether it was asked for a profile; whoever makes one takes the flag back."""
    _previous: dict[signal.Signals, object] = field(default_factory=dict)

    def install(self) -> None:
        """Take over the stop signals, once; call from the main thread."""
        if self._previous:
            return
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        self._previous[PROFILE_SIGNAL] = signal.signal(PROFILE_SIGNAL, self._handle_profile)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    def _handle_profile(self, number: int, frame: FrameType | None) -> None:
        self.profile = True

    def agreed(
        self, control: dist.ProcessGroup, profile_steps: int = 0, save_failed: bool = False
    ) -> Agreement:
        """What holds for any rank holds for all; every rank must call it at the same point of a step."""
        wishes = torch.tensor([int(self.received is not None), profile_steps, int(save_failed)])
        dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=control)
        return Agreement(bool(wishes[0]), int(wishes[1]), bool(wishes[2]))
