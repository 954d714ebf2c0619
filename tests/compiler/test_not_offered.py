"""What this version does not do is refused where it is asked for, with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from shipway.compiler.compose import compose
from shipway.compiler.validate import validate
from shipway.schemas.diagnostics import Diagnostic


def refusal(override: str) -> Diagnostic:
    blueprint, found = validate(compose("tiny", (override,), None))
    assert blueprint is None
    (only,) = found
    return only


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("+training.layout.cpu-offload=true", "training.layout.offload: optimizer"),
        ("+training.layout.activation_offload=true", "recompute: full"),
        ("+training.layout.parameter_offload=true", "zero: 3"),
        ("training.precision.master=fp8", "training.precision.compute"),
        ("training.precision.compute=fp16", "bf16"),
    ],
)
def test_a_way_out(override: str, way_out: str) -> None:
    wrong = refusal(override)
    assert wrong.where is not None
    assert wrong.where.file == "override 1"
    assert way_out in wrong.help
    assert wrong.legal


def test_an_ordinary_mistake_is_told_as_one(tmp_path: Path) -> None:
    assert "Did you mean `recompute`" in refusal("+training.layout.recomputee=full").help
