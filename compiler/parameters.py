"""Count a model's parameters, in the three conventions that publishers use."""

from __future__ import annotations

from shipway.compiler.lower import LoweredModel, lower
from shipway.schemas.model import Model
from shipway.schemas.plan import BlockParameters, Parameters


def count(model: Model) -> Parameters:
    """Exact parameters of a validated model, in all and per token, and by block.

    Multi-token prediction counts in the total and not in what one token passes: it is not there
    when the model is used. Balancing biases count in the total only, as do a vision tower and its
    projector (a text token passes neither).
    """
    lowered = lower(model)
    embedding = model.vocabulary * model.width
    blocks = _blocks(lowered)
    total = sum(block.total for block in blocks)
    active = sum(block.active for block in blocks) + (embedding if model.tied_embeddings else 0)
    return Parameters(
        total=total,
        active=active,
        active_with_embedding=active + (0 if model.tied_embeddings else embedding),
        active_without_head=active - embedding,
        blocks=blocks,
    )


def _blocks(lowered: LoweredModel) -> tuple[BlockParameters, ...]:
    """Parameters by block, largest first."""
    counts: dict[str, tuple[int, int, int]] = {}
    parts = [(lowered.embedding, 1), *lowered.layer_kinds(), (lowered.final, 1), (lowered.head, 1)]
    if lowered.vision is not None:
        parts.append((lowered.vision, 1))
    for part, repeats in parts:
        for placed in part.operators:
            own = placed.operator.parameters()
            total, active = sum(p.count for p in own), sum(p.active for p in own)
            _add(counts, placed.operator.block, repeats, total * repeats, active * repeats)
    for part in lowered.prediction:
        _add(counts, part.name, 1, sum(p.count for p in part.parameters()), 0)
    rows = (
        BlockParameters(block=block, count=number, total=total, active=active)
        for block, (number, total, active) in counts.items()
        if total
    )
    return tuple(sorted(rows, key=lambda row: (-row.total, row.block)))


def _add(counts: dict[str, tuple[int, int, int]], block: str, number: int, total: int, active: int) -> None:
    before = counts.get(block, (0, 0, 0))
    counts[block] = (before[0] + number, before[1] + total, before[2] + active)
