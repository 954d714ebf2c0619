"""What all layouts have in common that differ only in how widely they shard states: a *core*.

A core fixes the cut, the passes' time and the activations. Its time and memory here are lower bounds of
every split of data parallel into replicas and shards, and nearly reached by the best one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler import bounds
from shipway.compiler.layouts import RECOMPUTE, SCHEDULES, Candidates
from shipway.compiler.memory import kept_activations, kept_by_single_chunks, receive_buffers, stays_gathered
from shipway.compiler.placed import Placed, placed
from shipway.compiler.problem import Problem
from shipway.compiler.schedule import pipeline_seconds
from shipway.compiler.step_time import hand_over_seconds
from shipway.compiler.tables import Tables
from shipway.compiler.unique import first_rows
from shipway.compiler.v_memory import v_kept
from shipway.compiler.v_timing import v_least_seconds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def least_seconds(problem: Problem, cores: Candidates, shared: Tables) -> Floats:
    """Least seconds of a step of each core."""
    seconds = np.empty(len(cores))
    for index, some in placed(cores, shared):
        seconds[index] = _seconds(problem, some)
    return seconds + bounds.beside_passes(problem, cores, shared)


def least_bytes(problem: Problem, cores: Candidates, shared: Tables) -> Floats:
    """Least peak bytes of each core."""
    least = np.empty(len(cores))
    for index, some in placed(cores, shared):
        least[index] = _bytes(problem, some)
    return least


def _seconds(problem: Problem, some: Placed) -> Floats:
    """Passes alone; of V-shaped schedules less than they take, and far sooner known."""
    own, forward, backward = some.own, some.cells("forward"), some.by_policy("backward")
    largest = some.received.max(axis=(1, 2))
    send = hand_over_seconds(problem, own, largest) if (own.pp > 1).any() else largest
    seconds = pipeline_seconds(forward, backward, send, own.micro_batches, own.pp)
    if some.is_v_shaped.any():
        least = v_least_seconds(forward, backward, _is_split(own), send, own.micro_batches, own.pp)
        seconds = np.where(some.is_v_shaped, least, seconds)
    return seconds


def _bytes(problem: Problem, some: Placed) -> Floats:
    own, shared = some.own, some.shared
    sizes, can = shared.sizes, problem.space.capability
    moments = 2 * some.states("adamw_numel") + some.states("muon_numel")
    kept = (some.states("shard_numel") * sizes.weight + moments * sizes.moment_here).sum(axis=1)
    # Without a pipeline the head's gradient at least stands beside all that is kept.
    lightest: Floats | float = shared.parts.hidden[shared.cell_of]
    if some.is_piped:
        # Under V-shaped schedules a rank may hold most before a weight part, which adds nothing.
        lightest = np.where(some.is_v_shaped, 0.0, shared.parts.lightest[own.recompute, shared.cell_of])
        whole = some.states("whole_numel").sum(axis=1) * sizes.gradient
        gathered = stays_gathered(some.states("gathered_bytes"), can)
        buffers = receive_buffers(some.received, some.returned, own.micro_batches, can)
        kept = kept + whole + gathered + buffers
    allocated = (kept + _activations(some)).max(axis=1) + lightest
    return bounds.peak(problem, allocated, own)


def _activations(some: Placed) -> Floats:
    """Kept activations at the worst moment of each rank's schedule, [cores, ranks]."""
    own, saved = some.own, some.by_policy("saved")
    if saved.shape[1] == 1:
        return kept_by_single_chunks(saved, own.pp, own.micro_batches)
    result = np.zeros((len(own), saved.shape[2]))
    waiting, split = some.cells("waiting") if some.is_v_shaped.any() else saved, _is_split(own)
    first, which = first_rows(own.pp, own.v_schedule)
    for number, (pp, schedule) in enumerate(zip(own.pp[first].tolist(), own.v_schedule[first], strict=True)):
        rows = np.flatnonzero(which == number)
        count, mine = own.micro_batches[rows], saved[rows, :, :pp]
        if schedule:
            held = v_kept(SCHEDULES[schedule], mine, waiting[rows, :, :pp], split[rows], count)
        else:
            held = kept_activations(mine, count)
        result[rows, :pp] = held
    return result


def _is_split(own: Candidates) -> npt.NDArray[np.bool_]:
    """Whether a V-shaped schedule puts weights' gradients off: recomputation keeps backward whole."""
    split: npt.NDArray[np.bool_] = own.recompute == RECOMPUTE.index("none")
    return split
