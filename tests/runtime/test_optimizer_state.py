"""State in host memory is updated as state on the device is, whatever slices cut it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shipway.runtime.adamw import AdamW, AdamWOptions, AdamWParameter
from shipway.runtime.muon import Muon, MuonOptions, MuonParameter
from shipway.runtime.optimizer_state import OnDevice, OnHost, cut, make_state

CPU = torch.device("cpu")
SHAPES = [(5, 4), (3,), (0, 4), (2, 3, 4), (1,), (6, 5)]


def weights(shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    for weight in made:
        weight.grad = torch.randn(weight.shape, generator=generator)
    made[-1].grad = None  # as where no token came by
    return made


def in_slices(owner: AdamW | Muon, elements: int) -> None:
    assert isinstance(owner._state, OnHost)
    owner._state = replace(owner._state, slice_elements=elements)


@pytest.mark.parametrize("elements", [1, 7, 20, 10_000])
def test_slices_hold_every_element_once_and_in_order(elements: int) -> None:
    sizes = [weight.numel() for weight in weights()]
    slices = list(cut(sizes, elements))
    flat = [entry for entries in slices for entry in entries]
    assert [index for index, _, _ in flat] == sorted(index for index, _, _ in flat)
    assert {index for index, _, _ in flat} == set(range(len(sizes))), "what is empty has its piece too"
    for entries in slices[:-1]:
        assert sum(part.stop - part.start for _, part, _ in entries) == elements
    for index, size in enumerate(sizes):
        parts = [part for owner, part, _ in flat if owner == index]
        assert parts[0].start == 0
        assert parts[-1].stop == size
        assert all(part.stop == after.start for part, after in pairwise(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [7, 10_000])
def test_adamw(elements: int, dtype: torch.dtype) -> None:
    both = []
    for host in (None, CPU):
        items = [AdamWParameter(str(i), weight, decay=i % 2 == 0) for i, weight in enumerate(weights())]
        optimizer = AdamW(items, AdamWOptions((0.9, 0.95), 1e-8, 0.1, dtype), host)
        if host:
            in_slices(optimizer, elements)
        for step in range(1, 4):
            optimizer.step(0.01, step)
        both.append(
            [*(item.parameter for item in items), *optimizer.first.values(), *optimizer.second.values()]
        )
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize("elements", [7, 10_000])
def test_muon(elements: int) -> None:
    both = []
    for host in (None, CPU):
        items = [
            MuonParameter(str(i), w, heads=1) for i, w in enumerate(weights([(6, 4), (2, 3, 4), (8, 3)]))
        ]
        optimizer = Muon(items, MuonOptions(0.95, 5, 0.2, 0.1, torch.float32, torch.float32), host)
        if host:
            in_slices(optimizer, elements)
        for _ in range(3):
            optimizer.step(0.01)
        both.append([*(item.parameter for item in items), *optimizer.momentum.values()])
    assert all(map(torch.equal, *both))
    assert any(value.any() for value in both[1][3:])


def test_state_of_no_parameters_is_none() -> None:
    assert isinstance(make_state([], (torch.float32,), CPU), OnDevice)
    assert list(make_state([], (torch.float32,), CPU).walk()) == []
