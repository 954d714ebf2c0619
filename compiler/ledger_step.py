"""Collectives of one optimizer step that follow its last backward, and those that count its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shipway.compiler.evaluate_states import Bytes
from shipway.compiler.frozen import frozen
from shipway.compiler.held import Degrees, Held
from shipway.compiler.ledger_states import ChunkStates
from shipway.compiler.muon_exchange import exchanges
from shipway.schemas.model import Experts, Model
from shipway.schemas.training import Muon, Training

COUNT_BYTES = 8
"""Counts are int64."""
SCALAR_BYTES = 4
"""Losses, norms and largest logits are fp32."""
BISECTIONS = 48
"""Rounds of counting in which exact quantile balancing finds its biases."""


@frozen
class Once:
    """Calls that an optimizer step makes a fixed number of times."""

    name: str
    axis: str
    collective: str
    bytes: int
    count: int = 1


def once_a_step(
    chunks: Sequence[ChunkStates],
    degrees: Degrees,
    sizes: Bytes,
    model: Model,
    training: Training,
    routers: int,
    latent_layers: int,
) -> Iterator[Once]:
    """Of a rank that holds `chunks`, with so many routers and latent-attention layers among them."""
    yield from _all("tokens of the step", ("dp_replicate", "data"), 2 * COUNT_BYTES)
    yield from _all("loss", ("dp_replicate", "dp_shard", "pp"), SCALAR_BYTES)
    trained = [h for chunk in chunks for h in chunk.held]
    for chunk in chunks:
        size = sum(h.part_elements for h in chunk.vectors) * 4
        yield from _all("gradients of fp32 vectors", ("dp_shard", "dp_replicate"), size)
    yield from _tensor_parallel(trained, sizes)
    yield from _norm(trained, degrees)
    yield from _muon(trained, degrees, training)
    experts = model.feed_forward.experts
    if experts is not None and routers:
        yield from _routing(experts, routers)
    optimizer = training.optimizer
    if isinstance(optimizer, Muon) and optimizer.qk_clip is not None and model.attention.latent is not None:
        heads = model.attention.latent.heads
        size = heads // degrees.tensor * SCALAR_BYTES
        yield from _all("largest logits", ("dp_replicate", "dp_shard"), size, latent_layers)
        yield Once("largest logits", "tp", "all_gather", heads * SCALAR_BYTES, latent_layers)


def _all(name: str, axes: Sequence[str], size: int, count: int = 1) -> Iterator[Once]:
    """One sum over the product of `axes`, which the runtime takes axis by axis."""
    if size:
        yield from (Once(name, axis, "all_reduce", size, count) for axis in axes)


def _tensor_parallel(trained: Sequence[Held], sizes: Bytes) -> Iterator[Once]:
    """Gradients of what every rank of tp holds, each a part of a sum; one call per number format."""
    whole = [h for h in trained if h.split is None and h.parameter.sharding != "expert"]
    by_width: dict[int, int] = {}
    for h in whole:
        width = 4 if h.parameter.fp32 else sizes.master
        by_width[width] = by_width.get(width, 0) + h.part_elements * width
    for size in by_width.values():
        yield Once("gradients of what tp does not split", "tp", "all_reduce", size)


def _norm(trained: Sequence[Held], degrees: Degrees) -> Iterator[Once]:
    """Squares are summed over the axes that parameters are sharded over, mesh by mesh."""
    meshes: dict[tuple[str, ...], None] = {}
    for h in {id(h): h for h in trained}.values():
        meshes[_sharded_over(h, degrees)] = None
    for axes in meshes:
        yield from (Once("gradient norm", a, "all_reduce", SCALAR_BYTES) for a in axes if a != "vectors")
    yield Once("gradient norm", "pp", "all_reduce", SCALAR_BYTES)


def _sharded_over(h: Held, degrees: Degrees) -> tuple[str, ...]:
    if h.parameter.sharding == "expert":
        return ("expert_shard", "ep") if degrees.expert > 1 else ("expert_shard",)
    split = () if h.split is None else ("tp",)
    if h.parameter.fp32 and len(h.parameter.shape) == 1:
        return (*split, "vectors")  # a mesh of their own
    return ("dp_shard", *split)


def _muon(trained: Sequence[Held], degrees: Degrees, training: Training) -> Iterator[Once]:
    optimizer = training.optimizer
    if not isinstance(optimizer, Muon):
        return
    items = [h for h in trained if h.parameter.optimizer == "muon"]
    for exchange in exchanges(items, degrees, optimizer.per_head):
        yield Once(exchange.name, exchange.axis, "all_to_all", exchange.sent_bytes)


def _routing(experts: Experts, routers: int) -> Iterator[Once]:
    """Loads of all routers in one call; what balances each router, in calls of its own."""
    axes, each = ("dp_replicate", "dp_shard", "tp"), experts.routed * COUNT_BYTES
    yield from _all("experts' loads", axes, each * routers)
    balancing = experts.balancing
    match balancing.kind:
        case "bias":
            yield from _all("load to balance by", axes, each, routers)
        case "quantile" if balancing.estimator == "histogram":
            yield from _all("margins to balance by", axes, each * balancing.bins, routers)
        case "quantile":
            yield from _all("tokens to balance by", axes, COUNT_BYTES, routers)
            yield from _all("margins to balance by", axes, each, BISECTIONS * routers)
