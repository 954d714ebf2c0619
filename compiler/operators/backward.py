"""Memory through an operator's backward, operation by operation.

What a layer needs beyond what it keeps is no sum of maxima: kept tensors fall as backward passes them, and
temporaries of one operation are gone when the next begins. Operators state their operations; here they are
walked through. Autograd adds up the gradients of an input in place (torch/csrc/autograd/input_buffer.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from shipway.compiler.frozen import frozen

Number: TypeAlias = Any


@frozen
class Step:
    """One operation of backward, in bytes of one micro-batch on one rank."""

    name: str
    makes: Number = 0
    """What it makes while all that was there before is still there."""
    frees: Number = 0
    """What is gone once it is done: temporaries, gradients it read, kept tensors that nothing reads again."""
    weights: Number = 0
    """Elements of parameters whose gradients it makes, in the precision of activations."""


@frozen
class Walk:
    """Steps one after another."""

    peak: Number
    """Most bytes beyond those at the beginning."""
    net: Number
    """Bytes at the end beyond those at the beginning."""
    weights: Number
    """Elements of parameters whose gradients were made; their bytes are in both."""


def walk(steps: Sequence[Step], element_bytes: int) -> Walk:
    """Most bytes while `steps` run, and what they leave."""
    peak: Number = 0
    alive: Number = 0
    weights: Number = 0
    for step in steps:
        alive = alive + step.makes + step.weights * element_bytes
        peak = np.maximum(peak, alive)
        alive = alive - step.frees
        weights = weights + step.weights
    return Walk(peak, alive, weights)


def total(sizes: Iterable[Number]) -> Number:
    """Sum of bytes."""
    return sum(sizes, 0)
