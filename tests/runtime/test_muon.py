"""Muon against its definition, and who does which matrix."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shipway.runtime.muon import Muon, MuonOptions, MuonParameter, rounds
from shipway.runtime.muon_exchange import assign_owners, copies_of
from shipway.runtime.newton_schulz import orthogonalise
from tests.runtime.ranks import run_ranks

OPTIONS = MuonOptions(0.9, 5, 0.2, 0.1, torch.float32, torch.float32)


def parameter(*shape: int, seed: int = 0) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    made = torch.nn.Parameter(torch.randn(shape, generator=generator))
    made.grad = torch.randn(shape, generator=generator)
    return made


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    for shape in ((6, 24, 10), (6, 10, 24)):
        made = orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(1)), 5, torch.float32)
        values = torch.linalg.svdvals(made)
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_direction_is_that_of_the_polar_factor() -> None:
    matrix = torch.randn(12, 8, generator=torch.Generator().manual_seed(2))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    made = orthogonalise(matrix.unsqueeze(0), 5, torch.float32)[0]
    cosine = (made * (left @ right)).sum() / made.norm() / (left @ right).norm()
    assert cosine > 0.97


def test_step_is_nesterov_scaled_by_the_longer_side_with_decoupled_decay() -> None:
    weight = parameter(6, 9)
    before, gradient = weight.detach().clone(), weight.grad.clone()
    Muon([MuonParameter("w", weight)], OPTIONS).step(0.01)
    direction = orthogonalise((1.9 * gradient).unsqueeze(0), 5, torch.float32)[0]
    expected = before * (1 - 0.01 * 0.1) - 0.01 * 0.2 * math.sqrt(9) * direction
    torch.testing.assert_close(weight.detach(), expected)


def test_heads_are_orthogonalised_apart() -> None:
    whole, halves = parameter(8, 5), [parameter(4, 5), parameter(4, 5)]
    for index, half in enumerate(halves):
        rows = slice(4 * index, 4 * index + 4)
        half.data.copy_(whole.data[rows])
        half.grad.copy_(whole.grad[rows])
    Muon([MuonParameter("w", whole, heads=2)], OPTIONS).step(0.01)
    Muon([MuonParameter(str(i), half) for i, half in enumerate(halves)], OPTIONS).step(0.01)
    torch.testing.assert_close(whole.data, torch.cat([half.data for half in halves]))


def test_stacked_experts_are_matrices_of_their_own() -> None:
    stack = parameter(3, 4, 7)
    single = parameter(4, 7)
    single.data.copy_(stack.data[1])
    single.grad.copy_(stack.grad[1])
    Muon([MuonParameter("stack", stack)], OPTIONS).step(0.01)
    Muon([MuonParameter("single", single)], OPTIONS).step(0.01)
    torch.testing.assert_close(stack.data[1], single.data)


def test_missing_gradient_still_decays_momentum_and_weight() -> None:
    weight = parameter(4, 4)
    weight.grad = None
    before = weight.detach().clone()
    Muon([MuonParameter("w", weight)], OPTIONS).step(0.01)
    torch.testing.assert_close(weight.detach(), before * (1 - 0.001))


def test_owners_share_the_work_and_every_matrix_has_one() -> None:
    items = [MuonParameter(str(i), parameter(4 * (1 + i % 5), 8)) for i in range(40)]
    owners = assign_owners([item.work for item in items], 4)
    loads = [
        sum(item.work for item, owner in zip(items, owners, strict=True) if owner == r) for r in range(4)
    ]
    assert set(owners) == {0, 1, 2, 3}
    assert max(loads) < 1.1 * min(loads)


def test_rounds_keep_all_matrices_and_give_every_rank_one() -> None:
    items = [MuonParameter(str(i), parameter(2, 2)) for i in range(10)]
    assert [item.name for part in rounds(items, 4) for item in part] == [str(i) for i in range(10)]


SHAPES = ((24, 10), (8, 40), (3, 12, 6), (16, 16), (5, 6), (2, 9))
"""Matrices that shards cut and do not cut, a stack of experts, and one of fewer rows than shards."""


def steps_over(replicas: int, shards: int) -> tuple[list[torch.Tensor], list[int]]:
    """Parameters after two steps on a mesh of replicas of shards, and matrices orthogonalised here."""
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "fsdp"))
    items = []
    for index, shape in enumerate(SHAPES):
        whole = parameter(*shape, seed=index)
        weight = torch.nn.Parameter(distribute_tensor(whole.data, mesh, [Replicate(), Shard(0)]))
        weight.grad = distribute_tensor(whole.grad, mesh, [Replicate(), Shard(0)])
        items.append(MuonParameter(str(index), weight, 2 if index == 1 else 1, copies_of(weight)))
    muon, made = Muon(items, OPTIONS), []
    orthogonal = muon._orthogonal
    muon._orthogonal = lambda units: made.append(units.numel()) or orthogonal(units)  # type: ignore[method-assign]
    for _ in range(2):
        muon.step(0.01)
    return [item.parameter.full_tensor().detach() for item in items], made


def test_replicas_share_the_matrices_and_end_up_equal_to_one_process() -> None:
    ((alone, whole_work),) = run_ranks(steps_over, 1, 1, 1)
    found = run_ranks(steps_over, 4, 2, 2)
    for parameters, _ in found:
        for mine, expected in zip(parameters, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    for parameters, _ in found[1:]:
        assert all(map(torch.equal, parameters, found[0][0]))
    assert sum(sum(work) for _, work in found) == sum(whole_work)
