"""What each row of the workload costs in one micro-batch, for every way of cutting a micro-batch.

A *cell* is a (context, sequences, cp, tp, ep): all that kernels, kept tensors and the operators' own
collectives depend on. Layouts share cells, so a million layouts ask the catalogue a few thousand times,
in one vectorised call per operator.
"""

from __future__ import annotations

from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from shipway.compiler.communication import Network
from shipway.compiler.fabric import Path, path
from shipway.compiler.frozen import frozen
from shipway.compiler.layouts import RECOMPUTE
from shipway.compiler.operators import fp8
from shipway.compiler.operators.base import Gemm, Number, Operator, Shard, Transfer, flops, forward_flops
from shipway.compiler.row_memory import RowPeaks, row_peaks
from shipway.compiler.timing import CATEGORIES, Machine, kernel_time
from shipway.compiler.unique import distinct
from shipway.compiler.workload import Workload
from shipway.schemas.model import Experts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

AXES = ("tp", "cp", "ep")
PHASES = ("forward", "backward")
POLICIES = len(RECOMPUTE)


@frozen(eq=False)
class Cells:
    """Arrays of one length: the part of one micro-batch that one rank works on."""

    context: Ints
    sequences: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    imbalance: Floats
    delta_heads: Ints
    """1 where context parallel exchanges heads of delta attention."""

    def __len__(self) -> int:
        return len(self.context)

    def take(self, cells: Ints) -> Cells:
        """A selection of them."""
        return Cells(*(getattr(self, name)[cells] for name in self.__dataclass_fields__))

    def shard(self, machine: Machine, fused: bool) -> Shard:
        """The cells as the catalogue takes them."""
        imbalance: Number = self.imbalance
        return Shard(
            sequences=self.sequences.astype(float),
            context=self.context.astype(float),
            tensor=self.tp.astype(float),
            context_parallel=self.cp.astype(float),
            expert=self.ep.astype(float),
            imbalance=imbalance,
            delta_heads=self.delta_heads,
            element_bytes=machine.element_bytes,
            implementation="fused" if fused else "plain",
            fp8_smallest=machine.fp8.smallest if machine.fp8 else None,
            casts_fused=machine.fp8 is not None and machine.fp8.casts_fused,
        )


@frozen(eq=False)
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
    weight: Floats
    """[rows, cells]: of backward, the gradients of matrices, which zero-bubble schedules put off."""
    waiting: Floats
    """[rows, cells]: bytes of the gradients of matrices' outputs, which those put off start from."""
    host: Floats
    """[rows, cells]: of forward and backward, time the device waits for the host to issue work."""
    saved: Floats
    """[policies, rows, cells]."""
    peaks: RowPeaks
    model_flops: Floats
    """[rows, cells]: forward and backward."""
    recompute_flops: Floats
    """[policies, rows, cells]."""
    hidden: Floats
    """[cells]: one hidden state between layers."""
    moved: Floats
    """[rows, cells]: bytes that leave for host memory in forward and come back in backward."""
    copying: Floats
    """[rows, cells]: of forward and backward, time that waits for them."""

    def take(self, cells: Ints) -> PartCosts:
        """Those of a selection of cells."""
        names = self.__dataclass_fields__.keys() - {"peaks"}
        arrays = {name: getattr(self, name)[..., cells] for name in names}
        return PartCosts(**arrays, peaks=self.peaks.take(cells))

    def beyond(self, peaks: Floats) -> Floats:
        """[policies, rows, cells]: most that backward adds to what a row keeps, of one of the peaks."""
        again = self.saved[:1] - self.saved + self.peaks.unread
        result: Floats = np.maximum(again + peaks, 0.0)
        result[1:] = np.maximum(result[1:], again[1:] + self.peaks.restart)
        return result

    @cached_property
    def beyond_whole(self) -> Floats:
        """`beyond` of `whole`."""
        return self.beyond(self.peaks.whole)

    @cached_property
    def lightest(self) -> Floats:
        """[policies, cells]: what backward adds in the layer, or at the head, that needs least."""
        least: Floats = self.beyond_whole[:, 1:].min(axis=1)
        return least


def load_imbalance(experts: Experts | None, local_tokens: Floats, ep: Ints, percentile: float) -> Floats:
    """Largest over mean load of an expert-parallel rank, at `percentile`, per cell.

    A rank's load is a sum of random choices with mean tokens x k, and of the skew its experts are left
    with by the balancing method (relative standard deviation of one expert's load).
    """
    if experts is None:
        return np.ones(len(ep))
    # Measured after one quantile step: only sampling noise is left; the sign rule and losses leave more.
    skew = {"quantile": 0.02, "bias": 0.10, "auxiliary": 0.15, "none": 0.60}[experts.balancing.kind]
    deviations = {degree: NormalDist().inv_cdf(percentile ** (1 / degree)) for degree in distinct(ep)}
    z = np.array([deviations[degree] for degree in ep.tolist()])
    load = np.maximum(local_tokens * experts.active, 1.0)
    spread = np.sqrt(1.0 / load + skew**2 * ep / experts.routed)
    return np.where(ep > 1, np.minimum(1.0 + z * spread, ep), 1.0)


def part_costs(
    work: Workload, cells: Cells, machine: Machine, network: Network, fused: bool, gradient_bytes: int = 4
) -> PartCosts:
    """Costs of every row in every cell; gradients take `gradient_bytes` an element while they are reduced."""
    shard = cells.shard(machine, fused)
    places = axis_paths(cells, network)
    index: dict[Operator, int] = {}
    orders = [
        [index.setdefault(operator, len(index)) for _, operator in row.operators()] for row in work.rows
    ]
    each = _Stack(*(np.zeros((*lead, len(index), len(cells))) for lead in _Stack.leading()))
    for operator, position in index.items():
        _fill(each, position, operator, shard, machine, network, places)
    counts = np.zeros((len(work.rows), len(index)))
    for number, order in enumerate(orders):
        np.add.at(counts[number], order, 1)
    return _summed(
        work, counts, row_peaks(work, shard, each.saved, index, gradient_bytes), each, shard, machine
    )


def axis_paths(cells: Cells, network: Network) -> dict[str, Path]:
    """Where the groups of the operators' axes lie, for every cell."""
    ones = np.ones_like(cells.tp)
    groups = {"tp": (cells.tp, ones), "cp": (cells.cp, cells.tp), "ep": (cells.ep, ones)}
    return {axis: path(network.fabric, size, stride) for axis, (size, stride) in groups.items()}


@frozen(eq=False)
class _Stack:
    """Costs of every distinct operator; the last axes are operators and cells."""

    compute: Floats
    recompute: Floats
    transfer: Floats
    repeated: Floats
    launches: Floats
    saved: Floats
    model_flops: Floats
    recompute_flops: Floats
    weight: Floats
    waiting: Floats

    @staticmethod
    def leading() -> tuple[tuple[int, ...], ...]:
        """Leading axes of each field."""
        policies = (POLICIES,)
        return (
            (2, len(CATEGORIES)),
            policies,
            (2, len(AXES)),
            policies,
            (),
            policies,
            (),
            policies,
            (),
            (),
        )


def _fill(
    each: _Stack,
    position: int,
    operator: Operator,
    shard: Shard,
    machine: Machine,
    network: Network,
    places: dict[str, Path],
) -> None:
    """Put one operator's costs at its position."""
    kernels = fp8.kernels_of(operator, shard)
    times = {}
    for kernel in kernels:
        time = times[kernel.name] = kernel_time(kernel, machine)
        each.compute[0, time.category, position] += time.forward
        each.compute[1, time.category, position] += time.backward
        each.launches[position] += time.launches
        each.weight[position] += time.weight
        if isinstance(kernel, Gemm) and not kernel.gradients_in_forward:
            each.waiting[position] += kernel.rows * kernel.columns * kernel.groups * shard.element_bytes
    work = flops(kernels)
    each.model_flops[position] += work.forward + work.backward
    for policy, name in enumerate(RECOMPUTE):
        each.saved[policy, position] += sum((t.bytes for t in operator.saved(shard, name)), 0.0)
        for kernel in fp8.recomputed(operator, shard, name):
            time = times.get(kernel.name) or kernel_time(kernel, machine)
            each.recompute[policy, position] += time.forward
            each.recompute_flops[policy, position] += forward_flops(kernel)
    for transfer in operator.transfers(shard):
        seconds = network.seconds_on(places[transfer.axis], transfer.collective, transfer.bytes)
        seconds = np.maximum(seconds * transfer.calls - seconds_under(transfer, machine), 0.0)
        each.transfer[PHASES.index(transfer.phase), AXES.index(transfer.axis), position] += seconds
        for policy, name in enumerate(RECOMPUTE):
            each.repeated[policy, position] += seconds * transfer.repeats(name)


def seconds_under(transfer: Transfer, machine: Machine) -> Number:
    """Seconds of the work that the runtime does while something travels."""
    times = [kernel_time(kernel, machine) for kernel in transfer.under]
    return sum((t.forward if transfer.phase == "forward" else t.backward for t in times), 0.0)


def _summed(
    work: Workload, counts: Floats, peaks: RowPeaks, each: _Stack, shard: Shard, machine: Machine
) -> PartCosts:
    """Operators' costs as rows'."""
    recomputable = np.array([row.recomputable for row in work.rows])[:, None]

    def rows(per_operator: Floats) -> Floats:
        result: Floats = counts @ per_operator
        return result

    def policies(per_operator: Floats) -> Floats:
        # The embedding and the head are never recomputed, whatever the policy.
        result: Floats = np.where(recomputable, rows(per_operator), rows(per_operator[0]))
        return result

    compute, transfer = rows(each.compute), rows(each.transfer)
    recompute, saved = policies(each.recompute), policies(each.saved)
    # A recomputed part keeps its own input, and repeats the collectives of its forward.
    hidden = np.broadcast_to(
        np.asarray(shard.local_tokens * work.width * shard.element_bytes, dtype=float),
        each.launches.shape[1:],
    )
    for policy, name in enumerate(RECOMPUTE):
        states = np.array([sum(part.kept_states(name) for part in row.parts) for row in work.rows])
        saved[policy] += states[:, None] * hidden
    forward = compute[0].sum(axis=0) + transfer[0].sum(axis=0)
    backward = compute[1].sum(axis=0) + transfer[1].sum(axis=0) + recompute
    backward = backward + np.where(recomputable, rows(each.repeated), 0.0)
    issue = rows(each.launches) * machine.efficiency.host_seconds
    waits_forward = np.maximum(issue - forward, 0.0)
    # Backward issues twice as much as forward, and what recomputation repeats.
    repeats = 1.0 + (recompute > 0)
    waits_backward = np.maximum((1.0 + repeats) * issue - backward, 0.0)
    return PartCosts(
        compute=compute,
        recompute=recompute,
        transfer=transfer,
        forward=forward + waits_forward,
        backward=backward + waits_backward,
        weight=rows(each.weight),
        waiting=rows(each.waiting),
        host=waits_forward + waits_backward[0],
        saved=saved,
        peaks=peaks,
        model_flops=rows(each.model_flops),
        recompute_flops=policies(each.recompute_flops),
        hidden=hidden,
        moved=np.zeros_like(compute[0, 0]),
        copying=np.zeros_like(compute[0, 0]),
    )
