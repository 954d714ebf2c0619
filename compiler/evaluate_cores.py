"""What all layouts have in common that differ only in how widely they shard states: a *core*.

A core fixes the cut, the passes' time and the activations. Its time and memory here are lower bounds of
every split of data parallel into replicas and shards, and nearly reached by the best one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler import bounds
from shipway.compiler.chunked import Chunked, chunk, handed_over
from shipway.compiler.evaluate import kept_bytes
from shipway.compiler.layouts import Candidates
from shipway.compiler.memory import by_rank, receive_buffers, stays_gathered
from shipway.compiler.problem import Problem
from shipway.compiler.step_time import least_pass_seconds
from shipway.compiler.tables import Tables
from shipway.compiler.workload import LAST

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def least_seconds(problem: Problem, cores: Candidates, shared: Tables) -> Floats:
    """Least seconds of a step of each core."""
    seconds = np.empty(len(cores))
    for index, chunked in chunk(cores, shared):
        seconds[index] = least_pass_seconds(problem, chunked)
    return seconds


def least_bytes(problem: Problem, cores: Candidates, shared: Tables) -> Floats:
    """Least peak bytes of each core."""
    least = np.empty(len(cores))
    for index, chunked in chunk(cores, shared):
        least[index] = _bytes(problem, chunked)
    return least


def _bytes(problem: Problem, chunked: Chunked) -> Floats:
    own, pp, shared = chunked.own, chunked.pp, chunked.shared
    sizes, can = shared.sizes, problem.space.capability
    moments = 2 * chunked.states("adamw_numel") + chunked.states("muon_numel")
    kept = by_rank(chunked.states("shard_numel") * sizes.weight + moments * sizes.moment_here, pp).sum(axis=1)
    held = kept_bytes(chunked)
    temporary = shared.parts.scratch + shared.parts.overhead
    # Without a pipeline activations are freed before a layer's temporaries are made.
    lightest = temporary[:, 1:LAST].min(axis=1)[own.recompute, chunked.cell] if pp > 1 else 0.0
    stream = 2 * shared.parts.hidden[chunked.cell]
    if pp > 1:
        whole = by_rank(chunked.states("whole_numel"), pp).sum(axis=1) * sizes.gradient
        gathered = stays_gathered(chunked.states("gathered_bytes"), pp, can)
        buffers = receive_buffers(*handed_over(chunked), pp, own.micro_batches, can)
        kept = kept + whole + gathered + buffers
    allocated = (kept + held).max(axis=1) + lightest + stream
    return bounds.peak(problem, allocated, own)
