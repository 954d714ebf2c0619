"""Rows of the parity table that the planner itself proposes, asked by the command that users have."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shipway.runtime.parity.batches import CONTEXT_TOKENS, SEQUENCES
from shipway.runtime.parity.command import shipway
from shipway.runtime.parity.table import MODELS, Row
from shipway.schemas.layout import Layout

STAGE = (
    "training.stages=[{"
    f"name: parity, context: {CONTEXT_TOKENS}, tokens: {100 * SEQUENCES * CONTEXT_TOKENS},"
    f" global_batch: {SEQUENCES * CONTEXT_TOKENS}, learning_rate: {{kind: cosine, peak: 1e-3}}"
    "}]"
)
ASKED: Mapping[str, tuple[str, ...]] = {
    "2": ("cluster=h200_2",),
    "4": ("cluster=h200_4",),
    "8": ("cluster=h200_8",),
    "8, pipeline": ("cluster=h200_8", "training.layout.pipeline_parallel=2"),
    "8, context": ("cluster=h200_8", "training.layout.context_parallel=2"),
    "8, tensor": ("cluster=h200_8", "training.layout.tensor_parallel=2"),
    "8, experts": ("cluster=h200_8", "training.layout.expert_parallel=4"),
}
"""Clusters, and axes pinned so that the planner fills in the rest."""
RUNNERS_UP = 2


def proposals() -> dict[str, Row]:
    """The best layout of every question, and the runners-up of those that pin nothing."""
    rows: dict[str, Row] = {}
    for name, asked in ASKED.items():
        (stage,) = json.loads(shipway("plan", *MODELS["hybrid"], STAGE, *asked, "--json"))["stages"]
        others = [] if "," in name else [entry["layout"] for entry in stage["alternatives"][:RUNNERS_UP]]
        for place, found in enumerate([stage["layout"], *others], 1):
            layout = Layout.model_validate(found)
            if layout not in [row.layout for row in rows.values()]:
                rows[f"planned for {name} ({place}): {describe(layout)}"] = Row(layout)
    return rows


def describe(layout: Layout) -> str:
    """Axes of more than one rank, and what is recomputed."""
    axes = {
        "pp": layout.pipeline_parallel,
        "rep": layout.data_parallel_replicate,
        "fsdp": layout.data_parallel_shard,
        "cp": layout.context_parallel,
        "tp": layout.tensor_parallel,
        "ep": layout.expert_parallel,
    }
    words = [f"{axis} {degree}" for axis, degree in axes.items() if degree > 1]
    words += [f"zero {layout.zero}"] if layout.data_parallel_shard > 1 else []
    words += [layout.recompute] if layout.recompute != "none" else []
    return ", ".join(words) or "one device"
