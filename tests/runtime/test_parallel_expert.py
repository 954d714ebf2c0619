"""Expert parallel trains what one process trains, whatever the routing, and checkpoints cross its degrees."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.mesh import MeshPool, build_mesh
from shipway.runtime.parallel.expert import apply_expert_parallel, order_of_arrivals
from shipway.runtime.routing import routers
from shipway.schemas.layout import Layout
from shipway.schemas.training import AdamW, Muon, Optimizer
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import SEQUENCES, make_trainer, run_steps, whole_parameters
from tests.templates.generated import load, variant

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
    "adamw": (AdamW(eps=1e-4), ()),  # with less, gradients of next to nothing move as far as any other
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


def choices(layout: Layout, pool: MeshPool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Experts that a step's forward chose under a layout, and those that its recomputation chose."""
    trainer = make_trainer(layout, pool=pool)
    made: dict[tuple[bool, str], list[torch.Tensor]] = defaultdict(list)

    def note(name: str, router: nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        is_again = torch._C._current_graph_task_id() != -1
        made[is_again, name].append(output[1].clone())

    names = routers(trainer.model)
    for name, router in names.items():
        router.register_forward_hook(partial(note, name))
    run_steps(trainer, range(1))
    return [c for n in names for c in made[False, n]], [c for n in names for c in made[True, n]]


def choices_of(layouts: list[Layout]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Of each layout in turn."""
    pool = MeshPool(torch.device("cpu"))
    return [choices(layout, pool) for layout in layouts]


def test_every_recomputed_choice_is_that_of_forward() -> None:
    layouts = [
        Layout(data_parallel_shard=2, expert_parallel=2, micro_batch=2, micro_batches=2, recompute=policy)
        for policy in ("full", "selective")
    ]
    for rank in run_ranks(choices_of, 2, layouts):
        for first, again in rank:
            assert len(first) == len(again) > 0
            assert all(map(torch.equal, first, again))


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


def order_in_graph() -> dict[str, int]:
    """Sequence numbers of the nodes of a mixture's forward that tell what ran between what."""
    layout = Layout(data_parallel_shard=2, expert_parallel=2)
    with torch.device("meta"):
        whole = load(variant("hybrid")).Model()
    apply_expert_parallel(whole, build_mesh(layout, torch.device("cpu")))
    mixture = whole.to_empty(device="cpu").layers["1"].feed_forward
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for buffer in mixture.buffers():
        buffer.zero_()
    out = mixture(torch.randn(2, 8, 32))
    numbers: dict[str, int] = {}
    waiting, seen = [out.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [n for n, _ in node.next_functions]
        if any(getattr(n, "variable", None) is mixture.shared.down.weight for n in following):
            numbers["shared"] = node._sequence_nr()
        if node.name() in ("_DepartBackward", "_ArriveBackward"):
            numbers[node.name()] = node._sequence_nr()
        waiting += following
    return numbers


def test_shared_experts_run_while_tokens_travel_forward_and_backward() -> None:
    # Numbers rise in forward; backward takes the highest of those that are ready.
    for numbers in run_ranks(order_in_graph, 2):
        assert numbers["_DepartBackward"] < numbers["shared"] < numbers["_ArriveBackward"]


def test_arrivals_are_sorted_by_expert_then_source() -> None:
    # From rank 0: two rows of expert 0, one of expert 1; from rank 1: one of expert 0, none of expert 1.
    order = order_of_arrivals(torch.tensor([[2, 1], [1, 0]], dtype=torch.int32))
    assert order.token.tolist() == [0, 1, 3, 2]
    assert order.offsets.tolist() == [3, 4]
