"""Offload that cannot be, and hosts that are too small for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shipway.compiler.describe import describe
from shipway.compiler.host_memory import host_capacity
from shipway.compiler.offload import movable
from shipway.compiler.problem import Problem
from shipway.compiler.search import Found
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.layout import ACTIVATION_OFFLOAD

GIB = 2**30


def offload_conflicts(problem: Problem, layout: str) -> Iterator[Diagnostic]:
    """Why a pinned offload cannot be; `layout` is the path of the pins, with a dot at its end."""
    pins, can = problem.space.constraints, problem.space.capability
    pinned = pins.offload
    if pinned is None:
        return
    if pinned not in can.offload:
        yield Diagnostic(
            code="BP404",
            summary=f"the runtime does not run offload: {pinned}",
            field=f"{layout}offload",
            legal=can.offload,
            help="Leave it out: offload is then tried where nothing fits without.",
        )
    if pinned in ACTIVATION_OFFLOAD and pins.recompute not in (None, "full"):
        yield Diagnostic(
            code="BP404",
            summary=f"offload: {pinned} does not go with recompute: {pins.recompute}",
            field=f"{layout}offload",
            because=(
                "only the input of a layer leaves for the host: all that a layer keeps takes longer over the"
                " bus than making it again",
            ),
            legal=("none", "optimizer"),
            help="Pin recompute: full with it, or leave recompute out.",
        )
    if pinned in ACTIVATION_OFFLOAD and not movable(problem.work):
        yield Diagnostic(
            code="BP404",
            summary=f"offload: {pinned} has nothing to move in this model",
            field=f"{layout}offload",
            because=(
                "under model.residual.kind: full every layer's input and output stay sources that all later"
                " layers read",
            ),
            legal=("none", "optimizer"),
            help="Take one of these, or attention residuals over blocks.",
        )


def host_is_what_lacks(problem: Problem, found: Found) -> bool:
    """Whether layouts fit the devices, and what they offload does not fit the hosts."""
    return problem.space.offload != "none" and bool((found.peak_bytes <= problem.capacity_bytes).any())


def host_too_small(problem: Problem, found: Found, index: int) -> Diagnostic:
    """By how much the least demanding of the layouts that fit the devices misses."""
    on_devices = np.flatnonzero(found.peak_bytes <= problem.capacity_bytes)
    best = int(on_devices[found.node_bytes[on_devices].argmin()])
    needs, has = found.node_bytes[best] / GIB, host_capacity(problem) / GIB
    cluster = problem.blueprint.cluster
    return Diagnostic(
        code="PL001",
        summary=f"stage {problem.stage.name} does not fit: what it offloads takes {needs:,.1f} GiB of a"
        f" node's host memory, of which ranks can have {has:,.1f}",
        field=f"training.stages.{index}",
        because=(
            describe(found.candidates.layout(best, offload=problem.space.offload)),
            f"cluster.host_memory: {cluster.host_memory / GIB:,.1f} GiB, of which the system keeps a part",
        ),
        help="What would make it fit: more nodes to share the state; more host memory in each"
        " (cluster.host_memory).",
    )
