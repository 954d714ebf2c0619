"""Bytes of a model's weights as a server holds them, by number format and by device of a group."""

from __future__ import annotations

from collections.abc import Iterator

from shipway.compiler.frozen import frozen
from shipway.compiler.lower import LoweredModel, Part
from shipway.compiler.operators.base import Parameter
from shipway.schemas.serving import ServingWeights, WeightFormat

FP8_BITS = 8 + 32 / 128**2
"""An fp32 scale for each block of 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""
MXFP4_BITS = 4 + 8 / 32
"""A scale of 8 bits for every 32 values (OCP Microscaling Formats 1.0, section 5.1)."""

NOTES: dict[WeightFormat, str] = {
    "bf16": "all in bf16, but fp32 where the model computes in it (router, decay)",
    "fp8": "hidden matrices in fp8 with a scale per 128 x 128; embedding, head, vision, norms as in bf16",
    "mxfp4": "routed experts at 4.25 bits a weight; the rest as in bf16",
}


@frozen
class Spread:
    """Devices of one pipeline stage; experts are spread over all of them where there are any."""

    tensor: int
    data: int
    expert: int

    def share(self, parameter: Parameter) -> int:
        """Devices that divide a parameter."""
        match parameter.sharding:
            case "expert":
                return self.expert
            case "replicated":
                return 1
            case _:
                return self.tensor


ALONE = Spread(1, 1, 1)


def parameter_bits(parameter: Parameter, form: WeightFormat, vision: bool = False) -> float:
    """Bits of one weight; the optimizer's word `muon` marks the hidden matrices."""
    if parameter.fp32:
        return 32
    if form == "mxfp4" and parameter.sharding == "expert":
        return MXFP4_BITS
    if form == "fp8" and parameter.optimizer == "muon" and not vision:
        return FP8_BITS
    return 16


def part_bytes(part: Part, form: WeightFormat, spread: Spread, *, vision: bool = False) -> float:
    """Weights of a part on one device."""
    return sum(p.count * parameter_bits(p, form, vision) / spread.share(p) for p in part.parameters()) / 8


def served_parts(lowered: LoweredModel) -> Iterator[Part]:
    """Every part that a server loads, in order: all but the prediction of further tokens."""
    if lowered.vision is not None:
        yield lowered.vision
    yield lowered.embedding
    yield from lowered.layers
    yield lowered.final
    yield lowered.head


def serving_weights(lowered: LoweredModel, form: WeightFormat) -> ServingWeights:
    """Bytes of the whole model, and those that a token decoded alone passes."""
    total = passed = 0.0
    for part in served_parts(lowered):
        vision = part is lowered.vision
        for parameter in part.parameters():
            size = parameter_bits(parameter, form, vision) / 8
            total += parameter.count * size
            if part is not lowered.embedding and not vision:
                passed += parameter.active * size
    if lowered.model.tied_embeddings:
        passed += part_bytes(lowered.embedding, form, ALONE)
    return ServingWeights(format=form, bytes=round(total), bytes_per_token=round(passed), note=NOTES[form])
