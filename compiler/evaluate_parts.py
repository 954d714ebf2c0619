"""What each row of the workload costs in one micro-batch, for every way of cutting a micro-batch.

A *cell* is a (context, sequences, cp, tp, ep): all that kernels, kept tensors and the operators' own
collectives depend on. Layouts share cells, so a million layouts ask the catalogue a few thousand times,
in one vectorised call per operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from shipway.compiler.communication import Network
from shipway.compiler.layouts import RECOMPUTE
from shipway.compiler.operators.base import Number, Operator, Shard, Transfer, flops, forward_flops
from shipway.compiler.timing import CATEGORIES, Machine, kernel_time
from shipway.compiler.workload import Workload
from shipway.schemas.model import Experts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

AXES = ("tp", "cp", "ep")
PHASES = ("forward", "backward")
POLICIES = len(RECOMPUTE)


@dataclass(frozen=True)
class Cells:
    """Arrays of one length: the part of one micro-batch that one rank works on."""

    context: Ints
    sequences: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    imbalance: Floats

    def __len__(self) -> int:
        return len(self.context)

    def shard(self, element_bytes: int, fused: bool) -> Shard:
        """The cells as the catalogue takes them."""
        imbalance: Number = self.imbalance
        return Shard(
            sequences=self.sequences.astype(float),
            context=self.context.astype(float),
            tensor=self.tp.astype(float),
            context_parallel=self.cp.astype(float),
            expert=self.ep.astype(float),
            imbalance=imbalance,
            element_bytes=element_bytes,
            implementation="fused" if fused else "plain",
        )


@dataclass(frozen=True)
class PartCosts:
    """Per row and cell; seconds and bytes of one micro-batch on one rank."""

    compute: Floats
    """[phases, categories, rows, cells] without recomputation."""
    recompute: Floats
    """[policies, rows, cells]: forward kernels that backward repeats."""
    transfer: Floats
    """[phases, axes, rows, cells], exposed."""
    forward: Floats
    """[rows, cells]: all of forward."""
    backward: Floats
    """[policies, rows, cells]: all of backward, recomputation included."""
    host: Floats
    """[rows, cells]: of forward and backward, time the device waits for the host to issue work."""
    saved: Floats
    """[policies, rows, cells]."""
    scratch: Floats
    """[rows, cells]: largest temporary of one operator."""
    model_flops: Floats
    """[rows, cells]: forward and backward."""
    recompute_flops: Floats
    """[policies, rows, cells]."""
    hidden: Floats
    """[cells]: one hidden state between layers."""

    @cached_property
    def overhead(self) -> Floats:
        """[policies, rows, cells]: what recomputation holds again while a row's backward runs."""
        return np.maximum(self.saved[:1] - self.saved, 0.0)


def load_imbalance(experts: Experts | None, local_tokens: Floats, ep: Ints, percentile: float) -> Floats:
    """Largest over mean load of an expert-parallel rank, at `percentile`, per cell.

    A rank's load is a sum of random choices with mean tokens x k, and of the skew its experts are left
    with by the balancing method (relative standard deviation of one expert's load).
    """
    if experts is None:
        return np.ones(len(ep))
    # Measured after one quantile step: only sampling noise is left; the sign rule and losses leave more.
    skew = {"quantile": 0.02, "bias": 0.10, "auxiliary": 0.15, "none": 0.60}[experts.balancing.kind]
    deviations = {
        int(degree): NormalDist().inv_cdf(percentile ** (1 / int(degree))) for degree in np.unique(ep)
    }
    z = np.array([deviations[int(degree)] for degree in ep])
    load = np.maximum(local_tokens * experts.active, 1.0)
    spread = np.sqrt(1.0 / load + skew**2 * ep / experts.routed)
    return np.where(ep > 1, np.minimum(1.0 + z * spread, ep), 1.0)


def part_costs(work: Workload, cells: Cells, machine: Machine, network: Network, fused: bool) -> PartCosts:
    """Costs of every row in every cell."""
    shard = cells.shard(machine.element_bytes, fused)
    rows, count = len(work.rows), len(cells)
    table = _Table.empty(rows, count)
    costs: dict[Operator, _Table] = {}
    for index, row in enumerate(work.rows):
        for part in row.parts:
            if row.recomputable and part.states:
                # Under full recomputation a part keeps its own input, beside what its operators keep.
                state = shard.local_tokens * part.width * shard.element_bytes
                table.saved[RECOMPUTE.index("full"), index] += part.states * state
        for _, operator in row.operators():
            if operator not in costs:
                costs[operator] = _operator_costs(operator, shard, cells, machine, network)
            table.add(index, costs[operator], row.recomputable)
    return table.finish(work, shard, machine)


@dataclass(frozen=True)
class _Table:
    compute: Floats
    recompute: Floats
    transfer: Floats
    launches: Floats
    saved: Floats
    scratch: Floats
    model_flops: Floats
    recompute_flops: Floats

    @classmethod
    def empty(cls, rows: int, cells: int) -> _Table:
        def zeros(*leading: int) -> Floats:
            return np.zeros((*leading, rows, cells))

        return cls(
            zeros(2, len(CATEGORIES)),
            zeros(POLICIES),
            zeros(2, len(AXES)),
            zeros(),
            zeros(POLICIES),
            zeros(),
            zeros(),
            zeros(POLICIES),
        )

    def add(self, row: int, other: _Table, recomputable: bool) -> None:
        """Add an operator's costs to a row; the policy of a row that is never recomputed is `none`."""
        policies = slice(None) if recomputable else slice(0, 1)
        self.compute[:, :, row] += other.compute[:, :, 0]
        self.recompute[:, row] += other.recompute[policies, 0]
        self.saved[:, row] += other.saved[policies, 0]
        self.transfer[:, :, row] += other.transfer[:, :, 0]
        self.launches[row] += other.launches[0]
        self.scratch[row] = np.maximum(self.scratch[row], other.scratch[0])
        self.model_flops[row] += other.model_flops[0]
        self.recompute_flops[:, row] += other.recompute_flops[policies, 0]

    def finish(self, work: Workload, shard: Shard, machine: Machine) -> PartCosts:
        forward_transfer = self.transfer[0].sum(axis=0)
        forward = self.compute[0].sum(axis=0) + forward_transfer
        backward = self.compute[1].sum(axis=0) + self.transfer[1].sum(axis=0) + self.recompute
        # Full recomputation repeats a layer's forward collectives as well.
        repeats = np.array([row.recomputable for row in work.rows])
        backward[RECOMPUTE.index("full"), repeats] += forward_transfer[repeats]
        issue = self.launches * machine.efficiency.host_seconds
        waits_forward = np.maximum(issue - forward, 0.0)
        waits_backward = np.maximum(1.5 * issue - backward, 0.0)
        return PartCosts(
            compute=self.compute,
            recompute=self.recompute,
            transfer=self.transfer,
            forward=forward + waits_forward,
            backward=backward + waits_backward,
            host=waits_forward + waits_backward[0],
            saved=self.saved,
            scratch=self.scratch,
            model_flops=self.model_flops,
            recompute_flops=self.recompute_flops,
            hidden=np.broadcast_to(
                np.asarray(shard.local_tokens * work.width * shard.element_bytes, dtype=float),
                self.scratch.shape[1:],
            ),
        )


def _operator_costs(
    operator: Operator, shard: Shard, cells: Cells, machine: Machine, network: Network
) -> _Table:
    table = _Table.empty(1, len(cells))
    kernels = operator.kernels(shard)
    times = {}
    for kernel in kernels:
        time = times[kernel.name] = kernel_time(kernel, machine)
        table.compute[0, time.category, 0] += time.forward
        table.compute[1, time.category, 0] += time.backward
        table.launches[0] += time.launches
    work = flops(kernels)
    table.model_flops[0] += work.forward + work.backward
    for policy, name in enumerate(RECOMPUTE):
        table.saved[policy, 0] += sum((tensor.bytes for tensor in operator.saved(shard, name)), 0.0)
        for kernel in operator.recomputed(shard, name):
            time = times.get(kernel.name) or kernel_time(kernel, machine)
            table.recompute[policy, 0] += time.forward
            table.recompute_flops[policy, 0] += forward_flops(kernel)
    table.scratch[0] += operator.scratch_bytes(shard)
    for transfer in operator.transfers(shard):
        phase, axis = PHASES.index(transfer.phase), AXES.index(transfer.axis)
        table.transfer[phase, axis, 0] += transfer_seconds(transfer, cells, network)
    return table


def transfer_seconds(transfer: Transfer, cells: Cells, network: Network) -> Number:
    """Seconds of one call of an operator's collective."""
    size, stride = {
        "tp": (cells.tp, np.ones_like(cells.tp)),
        "cp": (cells.cp, cells.tp),
        "ep": (cells.ep, np.ones_like(cells.ep)),
    }[transfer.axis]
    return network.collective_seconds(transfer.collective, transfer.bytes, size, stride)
