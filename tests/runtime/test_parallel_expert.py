"""Expert parallel trains what one process trains, whatever the routing, and checkpoints cross its degrees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.mesh import MeshPool
from shipway.runtime.parallel.expert import order_of_arrivals
from shipway.runtime.routing import routers
from shipway.schemas.layout import Layout
from shipway.schemas.training import AdamW, Muon, Optimizer
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import SEQUENCES, make_trainer, run_steps, whole_parameters

ALONE = Layout(micro_batch=SEQUENCES)
LAYOUTS = {
    "ep 4": Layout(data_parallel_shard=4, expert_parallel=4, micro_batch=2),
    "ep 2 x expert shard 2": Layout(data_parallel_shard=4, expert_parallel=2, micro_batch=2),
    "ep 2, recomputed": Layout(data_parallel_shard=4, expert_parallel=2, micro_batch=2, recompute="full"),
    "ep 2 x replicas 2": Layout(
        data_parallel_replicate=2,
        data_parallel_shard=2,
        expert_parallel=2,
        micro_batch=1,
        micro_batches=2,
        recompute="selective",
    ),
}
CASES: dict[str, tuple[Optimizer, tuple[int, ...]]] = {
    "adamw": (AdamW(), ()),
    "expert without tokens": (Muon(), (7,)),
    "ranks without tokens": (Muon(), (2, 3, 4, 5, 6, 7)),
}


@dataclass(frozen=True)
class Outcome:
    """Of two steps."""

    losses: list[float]
    norms: list[float]
    loads: list[dict[str, list[int]]]
    biases: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def outcomes_of(layouts: list[Layout], optimizer: Optimizer, shunned: tuple[int, ...]) -> list[Outcome]:
    """Each layout in turn; experts in `shunned` are biased out of every choice of the first step."""
    pool, outcomes = MeshPool(torch.device("cpu")), []
    for layout in layouts:
        trainer = make_trainer(layout, optimizer, pool=pool)
        for router in routers(trainer.model).values():
            router.balance_bias[list(shunned)] = -50.0
        results = run_steps(trainer, range(2))
        outcomes.append(
            Outcome(
                [r.loss for r in results],
                [r.gradient_norm for r in results],
                [{name: load.tolist() for name, load in r.expert_loads.items()} for r in results],
                {name: router.balance_bias.clone() for name, router in routers(trainer.model).items()},
                whole_parameters(trainer),
            )
        )
    return outcomes


@pytest.fixture(scope="module", params=CASES)
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    (alone,) = run_ranks(outcomes_of, 1, [ALONE], *CASES[request.param])
    spread = run_ranks(outcomes_of, 4, list(LAYOUTS.values()), *CASES[request.param])[0]
    shunned = CASES[request.param][1]
    assert all(load[expert] == 0 for load in alone[0].loads[0].values() for expert in shunned)
    return {"alone": alone[0]} | dict(zip(LAYOUTS, spread, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_expert_parallel_trains_what_one_process_trains(outcomes: dict[str, Outcome], name: str) -> None:
    expected, found = outcomes["alone"], outcomes[name]
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)
    assert found.loads[0] == expected.loads[0]
    for layer, bias in expected.biases.items():
        torch.testing.assert_close(found.biases[layer], bias, rtol=1e-3, atol=2e-2)
    for parameter, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[parameter], value, rtol=2e-3, atol=2e-4, msg=parameter)


def test_recomputation_routes_as_forward_did(outcomes: dict[str, Outcome]) -> None:
    kept, again = outcomes["ep 2 x expert shard 2"], outcomes["ep 2, recomputed"]
    assert (again.losses, again.norms, again.loads) == (kept.losses, kept.norms, kept.loads)


def save_and_load(folder: str, written: Layout, read: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and momenta after a step under one layout, and as another layout reads them."""
    pool = MeshPool(torch.device("cpu"))
    first = make_trainer(written, pool=pool)
    run_steps(first, range(1))
    dcp.save(
        {"model": first.model.state_dict(), "optimizer": first.optimizer.state_tensors()},
        checkpoint_id=folder,
    )
    second = make_trainer(read, pool=pool, seed=9)
    state = {"model": second.model.state_dict(), "optimizer": second.optimizer.state_tensors()}
    dcp.load(state, checkpoint_id=folder)
    return (
        whole_parameters(first) | whole(first.optimizer.state_tensors()),
        whole_parameters(second) | whole(second.optimizer.state_tensors()),
    )


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """Gathered tensors."""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


@pytest.mark.parametrize(
    ("written", "read"), [("ep 4", "ep 2 x replicas 2"), ("ep 2 x expert shard 2", "ep 4")]
)
def test_checkpoints_cross_expert_parallel_degrees(tmp_path: Path, written: str, read: str) -> None:
    saved, loaded = run_ranks(save_and_load, 4, str(tmp_path), LAYOUTS[written], LAYOUTS[read])[0]
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, msg=name)


def uneven_experts() -> str:
    """What is said of eight experts over three ranks."""
    with pytest.raises(Fatal) as refusal:
        make_trainer(Layout(data_parallel_shard=3, expert_parallel=3))
    return str(refusal.value)


def test_degree_that_does_not_divide_the_experts_is_refused_with_the_legal_ones() -> None:
    refusal = run_ranks(uneven_experts, 3)[0]
    assert refusal == "expert_parallel 3 does not divide the 8 routed experts; it can be 1, 2, 4, 8"


def test_arrivals_are_sorted_by_expert_then_source() -> None:
    # From rank 0: two rows of expert 0, one of expert 1; from rank 1: one of expert 0, none of expert 1.
    order = order_of_arrivals(torch.tensor([[2, 1], [1, 0]], dtype=torch.int32))
    assert order.token.tolist() == [0, 1, 3, 2]
    assert order.offsets.tolist() == [3, 4]
