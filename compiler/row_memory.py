"""What each row of the workload needs in backward beyond what it keeps, in every cell at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.compiler.layer_memory import Passed, layer_peaks, passed
from shipway.compiler.layouts import RECOMPUTE
from shipway.compiler.operators.base import Operator, Shard
from shipway.compiler.operators.loss_head import LossHead
from shipway.compiler.workload import Row, Workload

Floats = npt.NDArray[np.float64]


@frozen(eq=False)
class RowPeaks:
    """What backward adds to what a row keeps, in bytes."""

    early: Floats
    """[rows, cells]: most that backward adds to what the row keeps without recomputation, until gradients of
    its own are reduced..."""
    reducing: Floats
    """...when those of its experts are, from a copy..."""
    late: Floats
    """...from then on..."""
    closing: Floats
    """...at its end, when the others are..."""
    whole: Floats
    """...and where none are reduced in it; gradients of outputs and parameters included in all."""
    restart: Floats
    """[rows, cells]: the least where the row is recomputed: when that ends."""
    unread: Floats
    """[policies, rows, cells]: kept for recomputation and not read by it."""
    head_gradient: Floats
    """[cells]: the gradient of the head's weight, which stays from its loss to the end of backward."""

    def take(self, cells: npt.NDArray[np.intp]) -> RowPeaks:
        """Those of a selection of cells."""
        return RowPeaks(*(getattr(self, name)[..., cells] for name in self.__dataclass_fields__))


def row_peaks(
    work: Workload, shard: Shard, saved: Floats, index: Mapping[Operator, int], gradient_bytes: int
) -> RowPeaks:
    """Walk through every row's backward; `saved` [policies, operators, cells] of operators at `index`."""
    shape = len(work.rows), saved.shape[2]
    early, reducing, late, closing, whole, restart = (np.zeros(shape) for _ in range(6))
    unread = np.zeros((len(RECOMPUTE), *shape))
    walked: dict[Operator, Passed] = {}
    hidden = shard.local_tokens * work.width * shard.element_bytes
    for number, row in enumerate(work.rows):
        if not row.recomputable:
            whole[number] = _outside_layers(row, shard, saved[0], index)
            continue
        (part,) = row.parts
        for _, operator in row.operators():
            if operator not in walked:
                walked[operator] = passed(operator, shard)
        states = part.gradient_states * hidden
        peaks = layer_peaks(
            [walked[operator] for _, operator in row.operators()], states, shard.element_bytes, gradient_bytes
        )
        early[number], reducing[number], late[number] = peaks.early, peaks.reducing, peaks.late
        closing[number], whole[number] = peaks.closing, peaks.whole
        restart[number] = states + part.beside_end(shard)
        for policy, name in enumerate(RECOMPUTE):
            unread[policy, number] = part.left_over(shard, name)
    heads = (operator for _, operator in work.rows[-1].operators() if isinstance(operator, LossHead))
    gradient = next(heads).gradient_bytes(shard)
    return RowPeaks(
        early,
        reducing,
        late,
        closing,
        whole,
        restart,
        unread,
        np.broadcast_to(gradient, shape[1:]).astype(float),
    )


def _outside_layers(row: Row, shard: Shard, saved: Floats, index: Mapping[Operator, int]) -> Floats:
    """[cells]: of operators in order, the largest scratch less what those after it had kept."""
    largest, behind = np.zeros(saved.shape[1]), np.zeros(saved.shape[1])
    for _, operator in reversed(list(row.operators())):
        largest = np.maximum(largest, operator.scratch_bytes(shard) - behind)
        behind = behind + saved[index[operator]]
    return largest
