"""A layout in one line, for messages."""

from __future__ import annotations

from shipway.schemas.layout import Layout


def describe(layout: Layout) -> str:
    """A layout in one line."""
    axes = (
        ("PP", layout.pipeline_parallel),
        ("VP", layout.virtual_stages),
        ("DP replicas", layout.data_parallel_replicate),
        ("FSDP", layout.data_parallel_shard),
        ("CP", layout.context_parallel),
        ("TP", layout.tensor_parallel),
        ("EP", layout.expert_parallel),
    )
    offload = "" if layout.offload == "none" else f", offload {layout.offload}"
    words = [f"{name} {degree}" for name, degree in axes if degree > 1] or ["one device"]
    return (
        f"{' x '.join(words)}, micro-batch {layout.micro_batch} x {layout.micro_batches},"
        f" recompute {layout.recompute}, ZeRO {layout.zero}{offload}"
    )
