"""Pictures in a stage: how many patches its rows may bring to the vision tower.

A picture of h x w pixels is ceil(h / cell) * ceil(w / cell) tokens, cell = patch * merge, and merge * merge
patches for each of them. How large pictures will be is not known beforehand, so a stage that reads any is
planned as if they filled every row: an upper bound of its memory and its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shipway.compiler.lower import Part, Placed
from shipway.compiler.operators.base import Operator
from shipway.compiler.operators.vision import Projector, VisionTower
from shipway.compiler.workload import FIRST, Row, Workload
from shipway.schemas.model import Vision
from shipway.schemas.training import Data, ImagesSource, RenderedTextSource


def with_pictures(
    work: Workload, vision: Vision | None, data: Data, mix: Mapping[str, float] | None, context: int
) -> Workload:
    """The workload of a stage whose rows hold pictures, or `work` itself where they hold none."""
    if vision is None or not data.has_images(mix):
        return work
    patches_per_token = vision.merge**2
    largest = patches_per_token * min(context, _largest_tokens(data, mix))
    first = work.rows[FIRST]
    parts = tuple(_seeing(part, patches_per_token, largest) for part in first.parts)
    rows = (Row(first.name, parts, first.recomputable), *work.rows[FIRST + 1 :])
    return replace(work, rows=rows)


def _largest_tokens(data: Data, mix: Mapping[str, float] | None) -> int:
    """Tokens that a picture of the stage may take."""
    return max(
        source.largest_tokens
        for name, source in data.sources.items()
        if isinstance(source, ImagesSource | RenderedTextSource) and (mix is None or mix.get(name, 0) > 0)
    )


def _seeing(part: Part, patches_per_token: int, patches_per_image: int) -> Part:
    def at(operator: Operator) -> Operator:
        if isinstance(operator, VisionTower | Projector):
            return replace(operator, patches_per_token=patches_per_token, patches_per_image=patches_per_image)
        return operator

    operators = tuple(Placed(placed.path, at(placed.operator)) for placed in part.operators)
    if operators == part.operators:
        return part
    return replace(part, operators=operators)
