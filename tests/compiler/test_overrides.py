"""Mistakes in overrides are told once, at the override, in its user's words."""

from __future__ import annotations

import pytest

from shipway.compiler.compose import compose
from shipway.compiler.validate import validate


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        (
            "training.layout={tensor_parallel: 0}",
            "BP104",
            "`training.layout.tensor_parallel` must be above 0",
        ),
        ("=3", "BP030", "an override needs a key"),
        ("+cluster=h200_1", "BP016", "has chosen a cluster already"),
        ("++cluster=h200_1", "BP016", "does not choose a cluster"),
        ("++a.b=3", "BP101", "there is no key `a` in a blueprint"),
        ("++model.nope.x=3", "BP101", "there is no key `nope` in `model`"),
        ("~model", "BP102", "`~model` takes out what has no default: `model`"),
        ("~training.stages", "BP102", "`~training.stages` takes out what has no default"),
    ],
)
def test_one_mistake_is_one_diagnostic_at_its_override(override: str, code: str, says: str) -> None:
    blueprint, diagnostics = validate(compose("tiny", ("training.seed=1", override), None))
    assert blueprint is None
    (found,) = diagnostics
    assert found.code == code
    assert says in found.summary
    assert found.where is not None
    assert found.where.file == "override 2"
