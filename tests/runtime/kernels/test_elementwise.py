"""Fused elementwise work: what is compiled where kernels are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shipway.runtime.kernels import elementwise


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


class PassesOver(Seen):
    passes_over_elementwise = True


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "is_plain", lambda *_: False)
    monkeypatch.setattr(elementwise, "_compiled", lambda function: function)


@elementwise.fuse
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_mode_that_passes_over_it_does_not_see_it_and_so_does_not_keep_it_from_being_compiled() -> None:
    x = torch.randn(3, 4)
    with PassesOver() as mode:
        y = doubled(x) + 1
    torch.testing.assert_close(y, x * 2 + 1)
    assert mode.operators == ["aten.add.Tensor"]


def test_any_other_mode_sees_it() -> None:
    x = torch.randn(3, 4)
    with Seen() as mode, PassesOver():
        doubled(x)
    assert mode.operators == ["aten.mul.Tensor"]
