"""Parameters, gradients and optimizer states of each row, for every way of sharding them.

A *sharding* is a (tp, ep, dense group, expert group): FSDP shards what tensor and expert parallel leave,
along the first dimension (experts: along the second when there are fewer local experts than ranks), and
pads every shard to the largest (torch.distributed.fsdp.fully_shard).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shipway.compiler.communication import Network
from shipway.compiler.operators.base import Parameter
from shipway.compiler.workload import Workload
from shipway.schemas.training import Muon, Training

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shardings:
    """Arrays of one length."""

    tp: Ints
    ep: Ints
    dense: Ints
    """Ranks of the group that shards dense parameters, dp_shard x cp."""
    expert: Ints
    """Ranks of the group that shards each expert."""

    def __len__(self) -> int:
        return len(self.tp)


@dataclass(frozen=True)
class StateCosts:
    """Per row and sharding, on one rank."""

    gathered_bytes: Floats
    """[rows, shardings]: parameters in compute precision, gathered."""
    dense_bytes: Floats
    """[rows, shardings]: what one all-gather of all but the experts carries, padding included."""
    expert_bytes: Floats
    """[rows, shardings]: the same of routed experts, which have a sharding group of their own."""
    whole_numel: Floats
    """[rows, shardings]: parameters with a gradient before FSDP shards them."""
    expert_numel: Floats
    """[rows, shardings]: of these, routed experts."""
    shard_numel: Floats
    """[rows, shardings]: their shard, padding included."""
    adamw_numel: Floats
    """[rows, shardings]: of the shard, what AdamW updates."""
    muon_numel: Floats
    """[rows, shardings]: of the shard, what Muon updates."""
    muon_flops: Floats
    """[rows, shardings]: Newton-Schulz work of one rank, matrices dealt out over the shards' owners."""
    largest_matrix: Floats
    """[rows, shardings]: elements of the largest matrix that Muon orthogonalises whole."""
    gather_seconds: Floats
    """[rows, shardings]: all-gather of the row's parameters."""
    reduce_seconds: Floats
    """[rows, shardings]: reduce-scatter of the row's gradients."""


@dataclass(frozen=True)
class Bytes:
    """Bytes an element takes in each role."""

    compute: int
    master: int
    gradient: int
    """Of gradients while they are reduced and, whole, accumulated."""
    moment: int


def element_bytes(training: Training) -> Bytes:
    """Sizes of the number formats a blueprint asks for."""
    size = {"bf16": 2, "fp32": 4}
    precision = training.precision
    compute = size[precision.compute]
    # FSDP reduces in the wider of the two: it never narrows what backward produced.
    return Bytes(
        compute,
        size[precision.master],
        max(size[precision.gradients], compute),
        size[precision.optimizer],
    )


def state_costs(
    work: Workload, shardings: Shardings, network: Network, training: Training, *, seconds: bool = True
) -> StateCosts:
    """States of every row under every sharding; collectives take 0 seconds unless asked for."""
    sizes = element_bytes(training)
    muon = isinstance(training.optimizer, Muon)
    steps = training.optimizer.newton_schulz_steps if isinstance(training.optimizer, Muon) else 0
    count = len(shardings)
    tables = {name: np.zeros((len(work.rows), count)) for name in StateCosts.__dataclass_fields__}
    cache: dict[Parameter, _Placed] = {}
    for index, row in enumerate(work.rows):
        dense_bytes, expert_bytes, resident = np.zeros(count), np.zeros(count), np.zeros(count)
        dense_whole, expert_whole = np.zeros(count), np.zeros(count)
        for parameter in row.parameters():
            key = _unnamed(parameter)
            placed = cache.get(key)
            if placed is None:
                placed = cache[key] = _place(parameter, shardings, steps)
            width = 4 if parameter.fp32 else sizes.compute
            trained = parameter.optimizer != "none"
            by_muon = muon and parameter.optimizer == "muon"
            is_expert = parameter.sharding == "expert"
            (expert_bytes if is_expert else dense_bytes)[:] += placed.padded * width
            resident += placed.local * width
            if not trained:
                continue
            (expert_whole if is_expert else dense_whole)[:] += placed.padded
            tables["whole_numel"][index] += placed.local
            if is_expert:
                tables["expert_numel"][index] += placed.local
            tables["shard_numel"][index] += placed.shard
            tables["muon_numel" if by_muon else "adamw_numel"][index] += placed.shard
            if by_muon:
                tables["muon_flops"][index] += placed.orthogonalisation_flops
                np.maximum(
                    tables["largest_matrix"][index], placed.matrix, out=tables["largest_matrix"][index]
                )
        tables["gathered_bytes"][index] = resident
        tables["dense_bytes"][index] = dense_bytes
        tables["expert_bytes"][index] = expert_bytes
        if not seconds:
            continue
        tables["gather_seconds"][index] = _both_groups(
            network, "all_gather", dense_bytes, expert_bytes, shardings
        )
        tables["reduce_seconds"][index] = _both_groups(
            network,
            "reduce_scatter",
            dense_whole * sizes.gradient,
            expert_whole * sizes.gradient,
            shardings,
        )
    return StateCosts(**tables)


def _both_groups(
    network: Network, collective: str, dense_bytes: Floats, expert_bytes: Floats, shardings: Shardings
) -> Floats:
    """Seconds of one call over the dense group and one over the experts' group."""
    dense: Floats = network.collective_seconds(collective, dense_bytes, shardings.dense, shardings.tp)
    if not expert_bytes.any():
        return dense
    result: Floats = dense + network.collective_seconds(
        collective, expert_bytes, shardings.expert, shardings.ep
    )
    return result


@dataclass(frozen=True)
class _Placed:
    local: Floats
    """Elements of the rank's tensor- or expert-parallel part."""
    shard: Floats
    padded: Floats
    """Elements of the gathered tensor, padding included."""
    orthogonalisation_flops: Floats
    matrix: Floats


def _unnamed(parameter: Parameter) -> Parameter:
    return Parameter(
        "",
        parameter.shape,
        parameter.sharding,
        parameter.optimizer,
        parameter.muon_heads,
        fp32=parameter.fp32,
    )


def _place(parameter: Parameter, shardings: Shardings, steps: int) -> _Placed:
    shape = [np.full(len(shardings), float(size)) for size in parameter.shape] or [np.ones(len(shardings))]
    ranks = shardings.dense
    match parameter.sharding:
        case "column" | "vocabulary":
            shape[0] = shape[0] / shardings.tp
        case "row":
            shape[1] = shape[1] / shardings.tp
        case "expert":
            shape[0] = shape[0] / shardings.ep
            ranks = shardings.expert
    local = np.prod(np.stack(shape), axis=0)
    first = np.ceil(shape[0] / ranks) * ranks / shape[0]
    if parameter.sharding == "expert":
        second = np.ceil(shape[1] / ranks) * ranks / shape[1]
        first = np.where(shape[0] >= ranks, first, second)
    padded = local * first
    work, matrix = _orthogonalisation(parameter, shape, steps)
    # Matrices of all parameters are dealt out together, so that owners' work evens out.
    return _Placed(local, padded / ranks, padded, work / ranks, matrix)


def _orthogonalisation(parameter: Parameter, shape: list[Floats], steps: int) -> tuple[Floats, Floats]:
    """Newton-Schulz FLOPs of the rank's matrices, 2 (2 n^2 m + n^3) a step with n <= m, and the size of one.

    Kimi K2's count (arXiv 2502.16982): n^2 m for X X^T, n^2 m for the last product, n^3 between them.
    """
    if parameter.optimizer != "muon" or steps == 0 or len(shape) < 2:
        zero = np.zeros(len(shape[0]))
        return zero, zero
    rows, columns, count = shape[-2], shape[-1], np.ones(len(shape[0]))
    if len(shape) == 3:
        count = shape[0]
    elif parameter.muon_heads > 1:
        head_rows = parameter.shape[0] / parameter.muon_heads
        count, rows = rows / head_rows, np.full(len(rows), head_rows)
    if parameter.sharding == "row":
        columns = np.full(len(columns), float(parameter.shape[1]))
    small, large = np.minimum(rows, columns), np.maximum(rows, columns)
    work = steps * 2.0 * (2.0 * small**2 * large + small**3) * count
    return work, rows * columns
