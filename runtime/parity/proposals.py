"""Rows of the parity table that the planner itself proposes, asked by the command that users have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from shipway.runtime.parity.batches import CONTEXT_TOKENS, SEQUENCES
from shipway.runtime.parity.command import shipway
from shipway.runtime.parity.table import Row, overrides
from shipway.schemas.layout import Layout

PLANS_AT_ONCE = 2
STAGE = (
    "training.stages=[{"
    f"name: parity, context: {CONTEXT_TOKENS}, tokens: {100 * SEQUENCES * CONTEXT_TOKENS},"
    f" global_batch: {SEQUENCES * CONTEXT_TOKENS}, learning_rate: {{kind: cosine, peak: 1e-3}}"
    "}]"
)
ASKED: Mapping[str, tuple[str, ...]] = {
    "2 CPUs": ("cluster=cpu_2",),
    "2": ("cluster=h200_2",),
    "4": ("cluster=h200_4",),
    "8": ("cluster=h200_8",),
    "8, pipeline": ("cluster=h200_8", "training.layout.pipeline_parallel=2"),
    "8, pipeline, experts": (
        *("cluster=h200_8", "training.layout.pipeline_parallel=2"),
        *("training.layout.data_parallel_shard=4", "training.layout.expert_parallel=4"),
    ),
    "8, context": ("cluster=h200_8", "training.layout.context_parallel=2"),
    "8, context, tensor": (
        *("cluster=h200_8", "training.layout.context_parallel=2"),
        "training.layout.tensor_parallel=2",
    ),
    "8, tensor": ("cluster=h200_8", "training.layout.tensor_parallel=2"),
    "8, experts": ("cluster=h200_8", "training.layout.expert_parallel=4"),
    "8, offloading": ("cluster=h200_8", "training.layout.offload=both"),
    "8, recomputing": ("cluster=h200_8", "training.layout.recompute=full"),
}
"""Clusters, and axes pinned so that the planner fills in the rest."""


def proposals(device: str, most_ranks: int) -> dict[str, Row]:
    """The best layout of every question of at most so many ranks, and what else ranks high where nothing is
    pinned."""
    asked = {name: pinned for name, pinned in ASKED.items() if _ranks(name) <= most_ranks}
    with ThreadPoolExecutor(PLANS_AT_ONCE) as pool:
        found = pool.map(lambda pinned: _ask(device, pinned), asked.values())
        answers = dict(zip(asked, found, strict=True))
    rows: dict[str, Row] = {}
    for name, layouts in answers.items():
        for layout in layouts if "," not in name else layouts[:1]:
            words = describe(layout)
            if all(describe(row.layout) != words for row in rows.values()):
                rows[f"planned for {name}: {words}"] = Row(layout)
    return rows


def _ranks(name: str) -> int:
    """Of the cluster that a question is about."""
    return int(name.split()[0].rstrip(","))


def _ask(device: str, pinned: tuple[str, ...]) -> list[Layout]:
    """Layouts that the planner proposes, best first; without runners-up of pipelines, which have no cut."""
    answer = json.loads(shipway("plan", *overrides("hybrid", device), STAGE, *pinned, "--json"))
    (stage,) = answer["stages"]
    found = [stage["layout"], *(entry["layout"] for entry in stage["alternatives"])]
    layouts = [Layout.model_validate_json(json.dumps(layout)) for layout in found]
    return [layout for layout in layouts if layout.pipeline_parallel == 1 or layout.stage_layers]


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
    words += [layout.schedule] if layout.pipeline_parallel > 1 else []
    words += [f"zero {layout.zero}"] if layout.data_parallel_shard > 1 else []
    words += ["heads"] if layout.delta_context == "heads" else []
    words += [layout.recompute] if layout.recompute != "none" else []
    words += [f"offload {layout.offload}"] if layout.offload != "none" else []
    return ", ".join(words) or "one device"
