"""All-to-all of rows with exact splits, with its gradient, at once or with other work under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """All-to-all of rows [sum(sent), ...]: `sent[r]` of them go to rank r, `received[r]` come from it."""
    return _ExchangeRows.apply(rows, list(sent), list(received), group)


def exchange_rows_during(
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
    work: Callable[[], None],
) -> Tensor:
    """As `exchange_rows`, while `work` runs; in backward while the gradients of `work` are computed.

    autograd takes the nodes that are ready youngest first: those of `work`, made between the two ends of
    the exchange, come between them in backward too.
    """
    flight = _Flight(list(sent), list(received), group)
    out = _Depart.apply(rows, flight)
    work()
    return _Arrive.apply(out, flight)


class _ExchangeRows(torch.autograd.Function):
    """Its backward sends every gradient the way back: each row's once, whatever the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = (received, sent, group)
        out, _ = _all_to_all(rows, sent, received, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back, _ = _all_to_all(grad, *ctx.back)
        return back, None, None, None


@dataclass
class _Flight:
    """An exchange under way."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup
    _pending: tuple[Any, Tensor, Tensor] | None = None
    """Its handle, what is sent and what is received, which must live until it is over."""

    def depart(self, rows: Tensor, *, backward: bool = False) -> Tensor:
        """Send rows off (in backward the other way); what is returned is not there yet."""
        ways = (self.received, self.sent) if backward else (self.sent, self.received)
        rows = rows.contiguous()
        out, handle = _all_to_all(rows, *ways, self.group, later=True)
        self._pending = (handle, rows, out)
        return out

    def arrive(self) -> Tensor:
        """Wait for what was sent off."""
        assert self._pending is not None
        (handle, _, out), self._pending = self._pending, None
        handle.wait()
        return out


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.depart(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.arrive(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.arrive().view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.depart(grad, backward=True)
        return grad, None  # of the shape that autograd expects; _Depart takes what comes back


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, later: bool = False
) -> tuple[Tensor, Any]:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    handle = dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group, async_op=later)
    return out, handle
