"""Memory of a layer while its backward runs, operator by operator, and what FSDP reduces inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shipway.compiler.frozen import frozen
from shipway.compiler.operators import fp8
from shipway.compiler.operators.backward import Number, Walk, walk
from shipway.compiler.operators.base import Operator, Shard


@frozen
class Passed:
    """An operator's backward, walked, in the two halves of one that stands around the operator behind it."""

    second_half: Walk | None
    whole: Walk
    reduced_apart: bool


def passed(operator: Operator, shard: Shard) -> Passed:
    """An operator's backward, walked."""
    steps, element = operator.backward_of_second_half(shard), shard.element_bytes
    rounded = fp8.scratch_bytes(operator, shard)
    second_half = walk(steps, element) if steps else None
    whole = walk(operator.backward(shard), element)
    return Passed(second_half, replace(whole, peak=whole.peak + rounded), operator.reduced_apart)


@frozen
class LayerPeaks:
    """Most bytes in a layer's backward beyond what it keeps without recomputation."""

    early: Number
    """Until the first gradients of its own are reduced: those of the layer behind may be under way."""
    reducing: Number
    """When the experts' have been copied to be reduced, and are still there themselves."""
    late: Number
    """From then on, the copy included until the router's follow."""
    closing: Number
    """At the end, with a copy of all others."""
    whole: Number
    """At any time where nothing is reduced yet: gradients then add up elsewhere."""


def layer_peaks(
    operators: Sequence[Passed], states_bytes: Number, element_bytes: int, gradient_bytes: int
) -> LayerPeaks:
    """Walk backward through a layer that begins with `states_bytes` of its outputs' gradients.

    FSDP copies the gradients of a group into one buffer of `gradient_bytes` an element and frees them; the
    buffer goes when the next group's is filled (torch.distributed.fsdp, foreach_reduce). Experts and router
    are groups of their own.
    """
    early: Number = states_bytes
    reducing: Number = 0
    late: Number = 0
    whole: Number = states_bytes
    alive: Number = states_bytes
    buffer: Number = 0
    left: Number = 0
    reduced = False
    for one, apart in _in_order(operators):
        top = alive + one.peak
        whole = np.maximum(whole, top)
        if reduced:
            late = np.maximum(late, top + buffer)
        else:
            early = np.maximum(early, top)
        alive = alive + one.net
        if apart:
            buffer, reduced = one.weights * gradient_bytes, True
            reducing = np.maximum(reducing, alive + buffer)
            alive = alive - one.weights * element_bytes
            late = np.maximum(late, alive + buffer)
        else:
            left = left + one.weights
    closing = alive + left * gradient_bytes
    return LayerPeaks(early, reducing, late, closing, whole)


def _in_order(operators: Sequence[Passed]) -> list[tuple[Walk, bool]]:
    """Walks in backward's order, and whether FSDP reduces after each."""
    order: list[tuple[Walk, bool]] = []
    for index in reversed(range(len(operators))):
        around = operators[index - 1].second_half if index else None
        if around is not None:
            order.append((around, False))
        order.append((operators[index].whole, operators[index].reduced_apart))
    return order
