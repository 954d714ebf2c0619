"""Expert load and balancing: counters of all ranks become one bias, and a figure to watch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shipway.runtime.parallelize import ParallelModel

ExpertLoads = dict[str, Tensor]
"""Hits of each expert [E] in the step, over all ranks, by layer name."""

DATA_AXES = ("dp_replicate", "fsdp", "tp")
"""Axes whose ranks route different tokens."""


def routers(model: ParallelModel) -> dict[str, nn.Module]:
    """Routers of this rank's layers, by layer name."""
    found = {}
    for part in model.parts:
        for name, layer in part.layers.items():
            router = getattr(layer.feed_forward, "router", None)
            if router is not None:
                found[name] = router
    return found


def read_and_balance(model: ParallelModel) -> ExpertLoads:
    """All-reduce the counters, set the balancing biases from them, and return the loads."""
    mesh = model.mesh
    found = routers(model)
    if not found:
        return {}
    loads = torch.stack([router.load for router in found.values()])
    mesh.all_reduce(loads, DATA_AXES)
    for router in found.values():
        router.update_balance(lambda tensor: mesh.all_reduce(tensor, DATA_AXES))
    return dict(zip(found, loads, strict=True))


def reset_counters(model: ParallelModel) -> None:
    """Forget the counts of a step that was not used."""
    for router in routers(model).values():
        router.load.zero_()
        if hasattr(router, "margin_histogram"):
            router.margin_histogram.zero_()
        if hasattr(router, "margins"):
            router.margins.clear()


def imbalance(load: Tensor) -> float:
    """Largest over mean load of one layer; 1 is perfectly even."""
    total = float(load.sum())
    return float(load.max()) * load.numel() / total if total else 1.0
