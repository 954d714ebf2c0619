"""Parameters, gradients and optimizer states of each row, for every way of sharding them.

A *sharding* is a (tp, ep, dense group, expert group): FSDP shards what tensor and expert parallel leave
(held.py), and pads every shard of dimension 0 to the largest (torch.distributed.fsdp.fully_shard).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from shipway.compiler.communication import Network
from shipway.compiler.frozen import frozen
from shipway.compiler.held import is_whole_vector
from shipway.compiler.operators.base import Parameter
from shipway.compiler.workload import Workload
from shipway.schemas.layout import OPTIMIZER_OFFLOAD, Offload
from shipway.schemas.training import Muon, Training

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@frozen(eq=False)
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

    def take(self, shardings: Ints) -> Shardings:
        """A selection of them."""
        return Shardings(*(getattr(self, name)[shardings] for name in self.__dataclass_fields__))


@frozen(eq=False)
class StateCosts:
    """Per row and sharding, on one rank."""

    def take(self, shardings: Ints) -> StateCosts:
        """Those of a selection of shardings."""
        return StateCosts(*(getattr(self, name)[:, shardings] for name in self.__dataclass_fields__))

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
    exchanged_numel: Floats
    """[rows, shardings]: of these, what goes to the owner of a matrix that its ranks cut, and back."""
    muon_flops: Floats
    """[rows, shardings]: Newton-Schulz work of one rank, matrices dealt out over the shards' owners."""
    largest_matrix: Floats
    """[rows, shardings]: elements of the largest matrix that Muon orthogonalises whole."""
    largest_adamw: Floats
    """[rows, shardings]: elements of the largest shard that AdamW updates."""
    largest_muon: Floats
    """[rows, shardings]: elements of the largest shard, a stack of experts perhaps, that Muon updates."""
    gather_seconds: Floats
    """[rows, shardings]: all-gather of the row's parameters."""
    reduce_seconds: Floats
    """[rows, shardings]: reduce-scatter of the row's gradients."""


@frozen
class Bytes:
    """Bytes an element takes in each role."""

    compute: int
    master: int
    gradient: int
    """Of gradients while they are reduced and, whole, accumulated."""
    moment: int
    average: int = 0
    """Of the weights' moving average; 0 without one."""
    hosted: bool = False
    """Whether moments lie in host memory."""

    @property
    def updates_in_one(self) -> bool:
        """Whether AdamW's update is one kernel (runtime/adamw.py)."""
        return self.master == self.moment == 4

    @property
    def weight(self) -> int:
        """What an element of a shard takes as weight: master copy and moving average."""
        return self.master + self.average

    @property
    def moment_here(self) -> int:
        """Of `moment`, what is on the device between updates."""
        return 0 if self.hosted else self.moment


def element_bytes(training: Training, offload: Offload = "none") -> Bytes:
    """Sizes of the number formats a blueprint asks for, and where states are kept."""
    size = {"bf16": 2, "fp32": 4}
    precision = training.precision
    compute = size[precision.activations]
    # FSDP reduces in the wider of the two: it never narrows what backward produced.
    return Bytes(
        compute,
        size[precision.master],
        max(size[precision.gradients], compute),
        size[precision.optimizer],
        0 if training.ema is None else size["fp32"],
        offload in OPTIMIZER_OFFLOAD,
    )


@frozen(eq=False)
class ParameterTable:
    """The distinct tensors of a model as arrays, and how often each occurs in each row."""

    first: Floats
    """[tensors, 1]: size of dimension 0."""
    second: Floats
    """[tensors, 1]: size of dimension 1, 1 for vectors."""
    rest: Floats
    """[tensors, 1]: product of the other dimensions."""
    over_tp: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]
    """Whether tensor parallel cuts dimension 0, dimension 1."""
    expert: npt.NDArray[np.bool_]
    whole: npt.NDArray[np.bool_]
    """Whether FSDP leaves it whole."""
    width: Floats
    """[tensors, 1]: bytes of an element as gathered."""
    trained: Floats
    """[tensors, 1]: 1 where a gradient reaches it."""
    by_muon: Floats
    """[tensors, 1]: 1 where Muon updates it."""
    head_rows: Floats
    """[tensors, 1]: rows that Muon orthogonalises together; 0 where it takes the whole matrix."""
    occurs: Floats
    """[rows, tensors]."""


def parameter_table(work: Workload, training: Training) -> ParameterTable:
    """Tensors of all rows, equal ones once."""
    sizes = element_bytes(training)
    muon = isinstance(training.optimizer, Muon)
    per_head = isinstance(training.optimizer, Muon) and training.optimizer.per_head
    index: dict[tuple[object, ...], int] = {}
    kept: list[Parameter] = []
    entries: list[tuple[int, int]] = []
    for row_index, row in enumerate(work.rows):
        for p in row.parameters():
            key = (p.shape, p.sharding, p.optimizer, p.muon_heads, p.fp32)
            if key not in index:
                index[key] = len(kept)
                kept.append(p)
            entries.append((row_index, index[key]))
    occurs = np.zeros((len(work.rows), len(kept)))
    np.add.at(occurs, tuple(np.array(entries).T), 1.0)

    def column(values: Iterable[float]) -> Floats:
        return np.array(list(values), dtype=float)[:, None]

    def flags(test: Callable[[Parameter], bool]) -> npt.NDArray[np.bool_]:
        return np.array([test(p) for p in kept])[:, None]

    shapes = [(*p.shape, 1, 1)[: max(len(p.shape), 2)] for p in kept]
    return ParameterTable(
        first=column(shape[0] for shape in shapes),
        second=column(shape[1] for shape in shapes),
        rest=column(math.prod(shape[2:]) for shape in shapes),
        over_tp=(
            flags(lambda p: p.sharding in ("column", "vocabulary")),
            flags(lambda p: p.sharding == "row"),
        ),
        expert=flags(lambda p: p.sharding == "expert"),
        whole=flags(is_whole_vector),
        width=column(4 if p.fp32 else sizes.compute for p in kept),
        trained=column(p.optimizer != "none" for p in kept),
        by_muon=column(muon and p.optimizer == "muon" for p in kept),
        head_rows=column(p.shape[0] / p.muon_heads if per_head and p.muon_heads > 1 else 0 for p in kept),
        occurs=occurs,
    )


def state_costs(
    table: ParameterTable,
    shardings: Shardings,
    network: Network,
    training: Training,
    *,
    seconds: bool = True,
) -> StateCosts:
    """States of every row under every sharding; collectives take 0 seconds unless asked for."""
    sizes = element_bytes(training)
    t, tp, ep = table, shardings.tp.astype(float), shardings.ep.astype(float)
    first = t.first / np.where(t.over_tp[0], tp, np.where(t.expert, ep, 1.0))
    second = t.second / np.where(t.over_tp[1], tp, 1.0)
    ranks = np.where(t.expert, shardings.expert, np.where(t.whole, 1, shardings.dense)).astype(float)
    local = first * second * t.rest
    # What tp or ep has split along dimension 0, and small stacks of experts, are only shared evenly.
    evenly = (t.over_tp[0] & (tp > 1)) | (t.expert & ((ep > 1) | (first < ranks)))
    padded = np.where(evenly, local, local * np.ceil(first / ranks) * ranks / first)
    shard = padded / ranks * t.trained

    def rows(per_tensor: Floats, only: Floats | None = None) -> Floats:
        result: Floats = (t.occurs if only is None else t.occurs * only.T) @ per_tensor
        return result

    def largest(per_tensor: Floats) -> Floats:
        result: Floats = np.where(t.occurs[:, :, None] > 0, per_tensor[None], 0.0).max(axis=1)
        return result

    expert = t.expert.astype(float)
    work, matrix = _orthogonalisation(t, first, training)
    dense_bytes, expert_bytes = rows(padded * t.width, 1 - expert), rows(padded * t.width, expert)
    dense_whole = rows(padded * t.trained, 1 - expert) * sizes.gradient
    expert_whole = rows(padded * t.trained, expert) * sizes.gradient
    zero = np.zeros_like(dense_bytes)
    return StateCosts(
        gathered_bytes=rows(local * t.width),
        dense_bytes=dense_bytes,
        expert_bytes=expert_bytes,
        whole_numel=rows(local * t.trained),
        expert_numel=rows(local * t.trained, expert),
        shard_numel=rows(shard),
        adamw_numel=rows(shard, 1 - t.by_muon),
        muon_numel=rows(shard, t.by_muon),
        exchanged_numel=rows(shard * _is_cut(t, first, second, ranks, tp, ep), t.by_muon),
        # Matrices of all parameters are dealt out together, so that owners' work evens out.
        muon_flops=rows(work / ranks),
        largest_matrix=largest(matrix),
        largest_adamw=largest(shard * (1 - t.by_muon)),
        largest_muon=largest(shard * t.by_muon),
        gather_seconds=_both_groups(network, "all_gather", dense_bytes, expert_bytes, shardings)
        if seconds
        else zero,
        reduce_seconds=_both_groups(network, "reduce_scatter", dense_whole, expert_whole, shardings)
        if seconds
        else zero,
    )


def _is_cut(
    t: ParameterTable, first: Floats, second: Floats, ranks: Floats, tp: Floats, ep: Floats
) -> npt.NDArray[np.bool_]:
    """Whether Muon's matrices lie on several ranks: heads that FSDP cuts, matrices, slices of experts.

    Experts that FSDP shards along dimension 0 lie whole on their ranks.
    """
    part = np.ceil(first / ranks)
    unit = np.where(t.head_rows > 0, t.head_rows, t.first)
    whole = (first % unit == 0) & ((part >= first) | (part % unit == 0)) & ~(t.over_tp[1] & (tp > 1))
    along_first = (first % ranks == 0) | ((ep == 1) & (first >= ranks))
    cut: npt.NDArray[np.bool_] = np.where(t.expert, ~along_first, ~whole)
    return cut


def _both_groups(
    network: Network, collective: str, dense_bytes: Floats, expert_bytes: Floats, shardings: Shardings
) -> Floats:
    """Seconds of one call over the dense group and one over the experts' group."""
    dense: Floats = network.collective_seconds(collective, dense_bytes, shardings.dense, shardings.tp)
    expert = network.collective_seconds(collective, expert_bytes, shardings.expert, shardings.ep)
    result: Floats = dense + np.where(expert_bytes > 0, expert, 0.0)
    return result


def _orthogonalisation(table: ParameterTable, first: Floats, training: Training) -> tuple[Floats, Floats]:
    """Newton-Schulz FLOPs of the rank's matrices and elements of one, [tensors, shardings].

    A step takes 2 (2 n^2 m + n^3) with n <= m: n^2 m for X X^T, n^2 m for the last product, n^3 between
    them (Muon, arXiv 2502.16982, Eq. 2). Experts' slices and heads are matrices of their own; a matrix
    that tensor parallel cuts along its rows' inner dimension is put together first.
    """
    steps = training.optimizer.newton_schulz_steps if isinstance(training.optimizer, Muon) else 0
    whole_rows = np.where(table.head_rows > 0, table.head_rows, first)
    matrix_rows = np.where(table.expert, table.second, whole_rows)
    columns = np.where(table.expert, table.rest, table.second)
    count = np.where(table.expert, first, first / whole_rows)
    small, large = np.minimum(matrix_rows, columns), np.maximum(matrix_rows, columns)
    work = steps * 2.0 * (2.0 * small**2 * large + small**3) * count * table.by_muon
    return work, matrix_rows * columns * table.by_muon
