"""What the planner offers the runtime can run: layouts drawn from the legal space are checked and built.

And what the runtime refuses is refused at plan time already, at the pin, with a way out.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shipway.compiler.assemble import choose
from shipway.compiler.infeasible import illegal
from shipway.compiler.layouts import enumerate_layouts
from shipway.compiler.problem import Problem
from shipway.runtime.mesh import build_mesh
from shipway.runtime.parallel.support import check_layout, check_model
from shipway.runtime.parallelize import build_parallel_model
from tests.compiler.operators.models import same_examples
from tests.compiler.operators.traced_step import fake_world
from tests.compiler.planner.planning import cluster, problem_of, rebuilt
from tests.runtime.small_plan import small_blueprint
from tests.templates.generated import load, variant

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about its own names

WIDE = {
    "attention__delta": {"heads": 4, "key_width": 16, "value_width": 16, "decay_rank": 8, "chunk": 32},
    "attention__latent__heads": 4,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "hybrid": WIDE,
    "rotary latent": {},
    "grouped": {},
    "grouped gated": {"width": 48},
    "all delta": {"width": 24},
    "vision": WIDE,
}
DEVICES = 12


@cache
def offers(name: str) -> tuple[Problem, Any]:
    """A stage and all its legal layouts."""
    model = variant(name, vocabulary=288, **VARIANTS[name])
    blueprint = small_blueprint({"only": 2}, 24)
    blueprint = blueprint.model_copy(update={"model": model})
    stage = {"training.stages.0.context": 256, "training.stages.0.global_batch": 24 * 256}
    made = rebuilt(blueprint, {**cluster(DEVICES, per_node=4), **stage})
    own = problem_of(made)
    return own, enumerate_layouts(own.space)


@pytest.mark.parametrize("name", VARIANTS)
@same_examples(4)
@given(st.integers(0, 10**9), st.booleans())
def test_offered_layouts_are_built(name: str, number: int, is_last: bool) -> None:
    own, candidates = offers(name)
    chosen = choose(own, candidates.take(np.array([number % len(candidates)])))
    bounds = chosen.group.chunked.bounds[0].tolist()
    layout = chosen.candidate.layout(0, tuple(pairwise(bounds)))
    precision, model = own.blueprint.training.precision, own.blueprint.model
    check_layout(layout)
    check_model(layout, model, own.space.context)
    with fake_world(layout.world_size - 1 if is_last else 0, layout.world_size):
        mesh = build_mesh(layout, torch.device("cpu"))
        assert build_parallel_model(load(model), mesh, precision, seed=0).named_parameters()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "tied embeddings over a pipeline": ("grouped", {"pipeline_parallel": 2}, "head shares the embedding"),
    "multi-token prediction over a pipeline": (
        "rotary latent",
        {"pipeline_parallel": 2},
        "multi-token prediction",
    ),
    "multi-token prediction over slices": (
        "rotary latent",
        {"context_parallel": 2},
        "multi-token prediction",
    ),
    "heads that tp does not divide": ("hybrid", {"tensor_parallel": 3}, "heads"),
    "key-value heads": ("grouped gated", {"tensor_parallel": 2}, "key-value heads"),
    "experts that ep does not divide": ("hybrid", {"expert_parallel": 3}, "routed experts"),
    "fewer micro-batches than pipeline ranks": (
        "hybrid",
        {"pipeline_parallel": 4, "data_parallel_shard": 3, "micro_batch": 8},
        "at least 4 micro-batches",
    ),
    "a pipeline that keeps nothing sharded": ("hybrid", {"pipeline_parallel": 2, "zero": 3}, "zero"),
    "blocks that FSDP cannot share": (
        "all delta",
        {"tensor_parallel": 2, "data_parallel_shard": 6, "data_parallel_replicate": 1},
        "cannot share",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_runtime_refuses_the_planner_refuses_at_the_pin(case: str) -> None:
    name, pins, words = REFUSED[case]
    own, _ = offers(name)
    reasons = illegal(problem_of(own.blueprint, 0, pins), 0)
    told = " ".join(line for d in reasons for line in (d.summary, *d.because))
    assert words in told
    assert all(d.field.startswith("training.stages.0.layout.") for d in reasons)
    assert all(d.help or d.legal for d in reasons)


def test_pictures_are_planned_with_every_axis() -> None:
    own, _ = offers("vision")
    made = rebuilt(own.blueprint, {"training.data.sources": {"pictures": {"kind": "rendered_text"}}})
    c = enumerate_layouts(problem_of(made).space)
    assert all(degrees.max() > 1 for degrees in (c.tp, c.cp, c.pp))
