"""What bounds the layouts of a training stage, and the degrees that each axis may have within it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from shipway.compiler.frozen import frozen
from shipway.compiler.held import UNSPLIT, Split
from shipway.compiler.operators.base import Limit, Number
from shipway.schemas.capability import CAPABILITY, Capability
from shipway.schemas.layout import LayoutConstraints, Offload

CONTEXT_MULTIPLE = 64
"""A context-parallel slice is a whole number of delta-rule chunks of this many tokens."""


@frozen
class Space:
    """What bounds the layouts of one stage."""

    devices: int
    devices_per_node: int
    domain: int
    """Devices joined by scale-up links."""
    sequences: int
    """Sequences of one optimizer step."""
    context: int
    layers: int
    experts: int
    """Routed experts, 0 for a dense model."""
    tied: bool
    """Whether embedding and head share one table."""
    limits: tuple[Limit, ...]
    constraints: LayoutConstraints
    any_size: bool = False
    """Whether layouts that leave most devices idle are of interest."""
    split: Split = UNSPLIT
    """Shapes that FSDP must be able to share."""
    delta_heads: int = 0
    """Heads of delta attention, 0 without."""
    granule: int = 1
    """Tokens of a slice come in groups of this many: 16 where products run in fp8."""
    predictions: int = 0
    """Multi-token prediction layers, which no pipeline or slice of a row can hold."""
    capability: Capability = CAPABILITY
    offload: Offload = "none"
    """What all layouts keep in host memory."""


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Divisors in rising order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))


def degrees(
    pinned: int | None, free: Iterable[int], allowed: Callable[[int], bool] = lambda degree: True
) -> list[int]:
    """The pinned degree alone, where it is allowed, or the free ones."""
    return list(free) if pinned is None else [pinned] if allowed(pinned) else []


def nearest_first(options: Sequence[int], wanted: int) -> tuple[str, ...]:
    """At most eight legal values, nearest to the wanted one first."""
    return tuple(str(v) for v in sorted(options, key=lambda v: (abs(v - wanted), v))[:8])


def limit_allows(limits: Sequence[Limit], axis: str, degree: int) -> bool:
    """Whether every limit of an axis is divisible by `degree`."""
    return all(limit.value % degree == 0 for limit in limits if limit.axis == axis)


def tensor_allowed(space: Space, degree: int) -> bool:
    """Whether a tensor-parallel degree divides all that it must."""
    return limit_allows(space.limits, "tp", degree) and space.context % (degree * space.granule) == 0


def context_allowed(space: Space, degree: int) -> bool:
    """Whether a context-parallel degree leaves whole slices, 2 x cp of them for causal attention."""
    if degree == 1:
        return True
    return (
        not space.predictions and space.context % (2 * degree) == 0 and context_slices(space.context, degree)
    )


def delta_heads_allowed(space: Space, cp: Number, tp: Number) -> Number:
    """Whether the heads of delta attention can be dealt out over context- and tensor-parallel ranks."""
    return space.delta_heads % (cp * tp) == 0


def context_slices(context: int, degree: int) -> bool:
    """Whether a slice is a whole number of delta-rule chunks."""
    return context // degree % CONTEXT_MULTIPLE == 0


def pipeline_allowed(space: Space, degree: int) -> bool:
    """Whether every pipeline rank has a layer, and nothing would have to stand on two of them."""
    whole = space.tied or space.predictions
    return degree == 1 or (degree <= space.layers and not whole)


def legal_tensor(space: Space) -> list[int]:
    """Tensor-parallel degrees: inside the scale-up domain unless pinned."""
    free = [d for d in divisors(space.domain) if space.devices % d == 0 and tensor_allowed(space, d)]
    return degrees(space.constraints.tensor_parallel, free, lambda d: tensor_allowed(space, d))


def legal_context(space: Space) -> list[int]:
    """Context-parallel degrees."""
    free = [d for d in divisors(space.devices) if context_allowed(space, d)]
    return degrees(space.constraints.context_parallel, free, lambda d: context_allowed(space, d))


def legal_pipeline(space: Space) -> list[int]:
    """Pipeline degrees."""
    free = [d for d in divisors(space.devices) if pipeline_allowed(space, d)]
    return degrees(space.constraints.pipeline_parallel, free, lambda d: pipeline_allowed(space, d))


def expert_degrees(space: Space) -> list[int]:
    """Expert-parallel degrees that divide the experts."""
    if not space.experts:
        return degrees(space.constraints.expert_parallel, [1], lambda degree: degree == 1)
    legal = [d for d in divisors(space.experts) if limit_allows(space.limits, "ep", d)]
    return degrees(space.constraints.expert_parallel, legal, lambda degree: degree in legal)
