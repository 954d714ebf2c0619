"""The check of blocks against float64: what it compares, and what it says of a block that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench import blocks_check
from bench.blocks import Block, Inputs, all_blocks

CPU = torch.device("cpu")


def block(name: str) -> Block:
    return next(b for b in all_blocks() if b.name == name)


@pytest.mark.parametrize(
    "name",
    ["delta attention, grouped heads, documents", "vision tower and projector", "decoding from caches"],
)
def test_blocks_are_within_their_bounds_in_bf16(name: str) -> None:
    found = blocks_check.outcome(block(name), CPU, compiled=False)
    assert found.failure is None
    assert [check for check in found.checks if not check.passed] == []


def test_a_wrong_block_exceeds_its_bounds_forward_and_backward() -> None:
    right = block("gated unit, situ")

    def scaled(module: nn.Module, inputs: Inputs) -> list[Tensor]:
        return [1.05 * y for y in right.found(module, inputs)]

    found = blocks_check.outcome(replace(right, found=scaled), CPU, compiled=False)
    assert {check.tensor for check in found.checks if not check.passed} == {
        "output 0",
        *("grad x", "grad gate.weight", "grad up.weight", "grad down.weight"),
    }


def test_a_block_that_raises_is_reported_and_the_others_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(module: nn.Module, inputs: Inputs) -> list[Tensor]:
        raise RuntimeError("no kernel image")

    first, second = block("gated unit, situ"), block("gated unit, swiglu")
    monkeypatch.setattr(blocks_check, "all_blocks", lambda: [replace(first, found=broken), second])
    out = tmp_path / "blocks.json"
    assert blocks_check.main(["--device", "cpu", "--out", str(out)]) == 1
    written = json.loads(out.read_text())
    assert [row["failure"] for row in written["blocks"]] == ["RuntimeError: no kernel image", None]
    assert not written["passed"]
    assert written["blocks"][1]["passed"]
