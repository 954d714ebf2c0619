"""Seconds that optimizer state in host memory adds to a step (runtime/optimizer_state.py).

It passes over the device once a step, in slices: one arrives while one is updated and one goes back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shipway.compiler.chunked import Chunked
from shipway.compiler.memory import ChunkStates, by_rank
from shipway.compiler.muon_exchange import ROUND_BYTES
from shipway.compiler.problem import Problem

Floats = npt.NDArray[np.float64]


def copy_seconds(
    problem: Problem, chunked: Chunked, states: ChunkStates, elementwise: Floats, products: Floats
) -> Floats:
    """Seconds that the copies add to an update on the busiest rank, [layouts].

    `elementwise` and `products` [layouts, ranks]: what the update takes by itself. Both directions run at
    once, with elementwise work under them. Muon takes the momenta of a whole round of matrices before it
    orthogonalises them: of a round only the next slice travels under the products. The first slice's way in
    and the last one's way out are hidden by nothing.
    """
    sizes, pp, own, rate = chunked.shared.sizes, chunked.pp, chunked.own, problem.machine.host_bandwidth
    each = problem.space.capability.offload_slice_elements
    adamw, muon = by_rank(states.adamw_numel, pp).sum(axis=1), by_rank(states.muon_numel, pp).sum(axis=1)

    def seconds(elements: Floats, width: int) -> Floats:
        result: Floats = (elements + 2 * np.minimum(elements, each)) * width / rate
        return result

    copied = seconds(adamw, 2 * sizes.moment) + seconds(muon, sizes.moment)
    round_bytes = np.maximum(ROUND_BYTES / (own.shard * own.cp), 1.0)[:, None]
    ahead = np.minimum(each * sizes.moment / round_bytes, 1.0)
    hidden = elementwise + ahead * np.minimum(muon * sizes.moment / rate, products)
    added: Floats = np.maximum(copied - hidden, 0.0).max(axis=1)
    return added
