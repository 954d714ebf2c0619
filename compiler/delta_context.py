"""Which form context parallel gives delta attention: passed states, or exchanged heads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler.operators.base import Shard
from shipway.compiler.operators.delta_attention import DeltaAttention
from shipway.compiler.problem import Problem
from shipway.compiler.space import delta_heads_allowed
from shipway.schemas.layout import Layout

Ints = npt.NDArray[np.int64]


def exchanges_heads(problem: Problem, sequences: Ints, cp: Ints, tp: Ints) -> Ints:
    """1 where heads are exchanged, by what the user pins, else by which form sends less; 0 without slices."""
    model, pinned = problem.blueprint.model, problem.space.constraints.delta_context
    if model.attention.delta is None:
        return np.zeros_like(cp)
    possible = (cp > 1) & delta_heads_allowed(problem.space, cp, tp)
    if pinned is None:
        shard = Shard(
            sequences=sequences.astype(float),
            context=float(problem.space.context),
            tensor=tp.astype(float),
            context_parallel=cp.astype(float),
            element_bytes=problem.machine.element_bytes,
        )
        possible &= DeltaAttention(model.width, model.attention.delta).sends_less_by_heads(shard)
    elif pinned == "state":
        possible = np.zeros_like(possible)
    chosen: Ints = possible.astype(np.int64)
    return chosen


def with_delta_context(problem: Problem, layout: Layout) -> Layout:
    """A layout with the form that its costs were counted with."""
    sizes = (layout.micro_batch, layout.context_parallel, layout.tensor_parallel)
    heads = exchanges_heads(problem, *(np.array([size], dtype=np.int64) for size in sizes))
    return layout.model_copy(update={"delta_context": "heads" if heads[0] else "state"})
