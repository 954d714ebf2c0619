"""Stages with things kept in host memory: which may be tried, and what moving activations costs.

The rules are the runtime's (runtime/parallel/offload.py): what a layer keeps under full recomputation leaves
under the next layer's forward and is fetched under the backward of the layer behind, so that a layer takes
the longer of its work and its copy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shipway.compiler.evaluate_parts import PartCosts
from shipway.compiler.layouts import RECOMPUTE
from shipway.compiler.problem import Problem
from shipway.compiler.workload import Workload
from shipway.schemas.layout import ACTIVATION_OFFLOAD, Offload

FULL = RECOMPUTE.index("full")
VARIANTS: tuple[Offload, ...] = ("optimizer", "activations", "both")
"""What is tried where nothing fits without."""


def variants(problem: Problem) -> list[Problem]:
    """The same stage with each kind of offload that may be tried unasked."""
    space, pins = problem.space, problem.space.constraints
    if pins.offload is not None or not problem.fused:  # a CPU's memory is the host's
        return []
    may_move = pins.recompute in (None, "full") and movable(problem.work)
    return [
        offloading(problem, offload)
        for offload in VARIANTS
        if offload in space.capability.offload and (may_move or offload not in ACTIVATION_OFFLOAD)
    ]


def offloading(problem: Problem, offload: Offload) -> Problem:
    """The same stage with all its layouts offloading something else."""
    return replace(problem, space=replace(problem.space, offload=offload))


def movable(work: Workload) -> bool:
    """Whether layers keep anything that they alone read again."""
    return any(row.movable_states for row in work.rows)


def with_activations(parts: PartCosts, work: Workload, host_bandwidth: float) -> PartCosts:
    """Costs of rows whose kept hidden states go to the host and come back, under full recomputation."""
    states = np.array([row.movable_states for row in work.rows], dtype=float)[:, None]
    moved = states * parts.hidden
    saved, backward = parts.saved.copy(), parts.backward.copy()
    saved[FULL] -= moved
    seconds = moved / host_bandwidth
    forward = np.maximum(parts.forward, seconds)
    backward[FULL] = np.maximum(parts.backward[FULL], seconds)
    waits = forward - parts.forward + backward[FULL] - parts.backward[FULL]
    return replace(parts, saved=saved, forward=forward, backward=backward, moved=moved, copying=waits)
