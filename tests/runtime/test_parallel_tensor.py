"""Tensor parallel with sequence parallel trains and scores what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shipway.runtime.evaluation.scorer import model_scorer
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.kernels import linear_cross_entropy
from shipway.runtime.mesh import MeshPool
from shipway.runtime.parallel.support import check_model
from shipway.runtime.parallel.vocabulary import vocabulary_cross_entropy
from shipway.schemas.layout import Layout
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import (
    SEQUENCES,
    SHALLOW,
    make_trainer,
    micro_batches,
    run_steps,
    whole_parameters,
)
from tests.templates.generated import variant

ALONE = Layout(micro_batch=SEQUENCES)
LAYOUTS = {
    2: {
        "tp 2": Layout(tensor_parallel=2, micro_batch=SEQUENCES),
        "tp 2, ep 2, recomputed": Layout(
            tensor_parallel=2, expert_parallel=2, micro_batch=2, micro_batches=4, recompute="full"
        ),
    },
    4: {
        "tp 2 x fsdp 2": Layout(tensor_parallel=2, data_parallel_shard=2, micro_batch=4),
        "tp 2 x replicas 2, ep 2": Layout(
            tensor_parallel=2,
            data_parallel_replicate=2,
            expert_parallel=2,
            micro_batch=4,
            recompute="selective",
        ),
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "hybrid": SHALLOW,
    "older delta": SHALLOW,
    "rotary latent": SHALLOW,
    "grouped": {"layers": 2},
    "three kinds": {},
}
"""With the changes to each."""
SPREAD = {
    2: [(layout, variant) for variant in VARIANTS for layout in LAYOUTS[2]],
    # What differs between variants lies inside tensor parallel, not in what is around it.
    4: [(layout, "hybrid") for layout in LAYOUTS[4]],
}


def outcomes_of(cases: list[tuple[Layout, str]]) -> list[dict[str, Any]]:
    """Of each case, two steps of a variant under a layout, and the scores that it then gives."""
    pool, found = MeshPool(torch.device("cpu")), []
    for layout, name in cases:
        trainer = make_trainer(layout, model=name, pool=pool, changes={**VARIANTS[name], "vocabulary": 64})
        results = run_steps(trainer, range(2))
        batch = micro_batches(2, trainer.model.mesh)[0]
        scores = model_scorer(trainer.model.parts[0])(batch)
        found.append(
            {
                "losses": [r.loss for r in results],
                "norms": [r.gradient_norm for r in results],
                "loads": results[0].expert_loads,
                "parameters": whole_parameters(trainer),
                "scores": scores.loss,
            }
        )
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """Of every variant in one process."""
    return dict(
        zip(VARIANTS, run_ranks(outcomes_of, 1, [(ALONE, name) for name in VARIANTS])[0], strict=True)
    )


@pytest.fixture(scope="module", params=SPREAD)
def spread(request: pytest.FixtureRequest) -> dict[tuple[str, str], dict[str, Any]]:
    """Of every layout and variant on so many ranks."""
    ranks = request.param
    cases = [(LAYOUTS[ranks][layout], name) for layout, name in SPREAD[ranks]]
    return dict(zip(SPREAD[ranks], run_ranks(outcomes_of, ranks, cases)[0], strict=True))


def test_tensor_parallel_trains_what_one_process_trains(
    alone: dict[str, dict[str, Any]], spread: dict[tuple[str, str], dict[str, Any]]
) -> None:
    for (layout, name), found in spread.items():
        expected, case = alone[name], f"{layout}: {name}"
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5), case
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4), case
        for layer, load in expected["loads"].items():
            assert found["loads"][layer].tolist() == load.tolist(), case
        rows = len(found["scores"])
        torch.testing.assert_close(found["scores"], expected["scores"][:rows], rtol=1e-3, atol=1e-3)
        for parameter, value in expected["parameters"].items():
            torch.testing.assert_close(
                found["parameters"][parameter], value, rtol=2e-3, atol=3e-4, msg=f"{case}: {parameter}"
            )


def vocabulary_loss() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, whole gradient of hidden and of this rank's rows, in chunks."""
    hidden, weight, labels = loss_inputs()
    part = weight.detach().chunk(2)[dist.get_rank()].requires_grad_()
    loss = vocabulary_cross_entropy(hidden, part, labels, dist.group.WORLD, chunk=3)
    (2 * loss).backward()
    dist.all_reduce(hidden.grad)
    return loss.detach(), hidden.grad, part.grad


def loss_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 6, dtype=torch.float64, generator=generator).requires_grad_()
    weight = (30 * torch.randn(8, 6, dtype=torch.float64, generator=generator)).requires_grad_()
    return hidden, weight, torch.tensor([0, 3, 4, 7, -100, 5, 1, 2, -100, 6])


def test_loss_over_a_split_vocabulary_is_that_of_the_whole() -> None:
    hidden, weight, labels = loss_inputs()
    loss = linear_cross_entropy(hidden, weight, labels)
    (2 * loss).backward()
    ranks = run_ranks(vocabulary_loss, 2)
    for found, of_hidden, _ in ranks:
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(of_hidden, hidden.grad)
    torch.testing.assert_close(torch.cat([rows for _, _, rows in ranks]), weight.grad)


def test_what_does_not_divide_is_refused_all_at_once_with_the_legal_degrees() -> None:
    model = variant("hybrid", vocabulary=64)
    check_model(Layout(tensor_parallel=2), model, 32)
    with pytest.raises(
        Fatal, match="divide 2 delta-attention heads, 2 latent-attention heads; below it 1, 2 "
    ):
        check_model(Layout(tensor_parallel=4), model, 32)
