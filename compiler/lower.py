"""Lower a model to the operators of its layers, one object per kind of layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from itertools import chain
from typing import TYPE_CHECKING, Any

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.attention_residual import AttentionResidual, ResidualAdd
from shipway.compiler.operators.base import (
    Kernel,
    Limit,
    Number,
    Operator,
    Parameter,
    Saved,
    Shard,
    Transfer,
)
from shipway.compiler.operators.delta_attention import DeltaAttention
from shipway.compiler.operators.embedding import Embedding
from shipway.compiler.operators.gated_unit import GatedUnit
from shipway.compiler.operators.grouped_attention import GroupedAttention
from shipway.compiler.operators.latent_attention import LatentAttention
from shipway.compiler.operators.loss_head import LossHead
from shipway.compiler.operators.mixture_of_experts import mixture_of_experts
from shipway.compiler.operators.norm import Norm
from shipway.compiler.operators.prediction import PredictionInput
from shipway.compiler.operators.vision import Projector, VisionTower
from shipway.schemas.layout import Recompute
from shipway.schemas.model import AttentionKind, FeedForwardKind, Model

if TYPE_CHECKING:
    import networkx


@frozen
class Placed:
    """An operator and where its module stands, relative to what holds it."""

    path: str
    """Module path, such as `attention`; empty when the operator's names are the holder's own."""
    operator: Operator

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Parameters by name, relative to the holder."""
        for parameter in self.operator.parameters():
            yield (f"{self.path}.{parameter.name}" if self.path else parameter.name), parameter


@frozen(eq=False)
class Part:
    """A run of operators that the pipeline never cuts: a layer, the embedding, the head, ..."""

    name: str
    """What it is, such as `delta attention + experts`; layers that differ only in how many states
    their attention residuals read share a name but not an object."""
    operators: tuple[Placed, ...]
    states: int = 0
    """Hidden states that a recomputed part keeps: its own input (1 for a layer; 2 when every sublayer's
    output stays a source of later layers). 0 for what is never recomputed: all but the layers."""
    product_states: int = 0
    """Of these, states that are outputs of products, which selective recomputation keeps in any case."""
    width: int = 0
    """Width of those states."""
    gradient_states: int = 1
    """Hidden states that the part hands on: a gradient of each is there when its backward begins."""
    held_states: int = 0
    """Hidden states that the layer's code holds to its end and keeps for nothing."""
    movable_states: int = 0
    """Of `states`, those that nothing but the part's own backward reads again, so that they can wait in host
    memory: not what stays a source of later layers."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every tensor by name, relative to the part."""
        return chain.from_iterable(placed.parameters() for placed in self.operators)

    def parameters(self) -> tuple[Parameter, ...]:
        """Every tensor of the part."""
        return tuple(parameter for _, parameter in self.named_parameters())

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        """Forward work."""
        return tuple(chain.from_iterable(p.operator.kernels(shard) for p in self.operators))

    def recomputed(self, shard: Shard, recompute: Recompute) -> tuple[Kernel, ...]:
        """Forward work that backward repeats."""
        policy = recompute if self.states else "none"
        return tuple(chain.from_iterable(p.operator.recomputed(shard, policy) for p in self.operators))

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        """Tensors kept for backward, names prefixed by their operator's path."""
        policy = recompute if self.states else "none"
        own = tuple(
            Saved(f"{placed.path}: {tensor.name}" if placed.path else tensor.name, tensor.bytes)
            for placed in self.operators
            for tensor in placed.operator.saved(shard, policy)
        )
        size = self.kept_states(policy) * shard.local_tokens * self.width * shard.element_bytes
        return own if policy == "none" else (Saved("input", size), *own)

    def kept_states(self, recompute: Recompute) -> int:
        """Hidden states that the part keeps beside what its operators keep, to start from in backward."""
        match recompute:
            case "none":
                return 0
            case "selective":
                return self.states - self.product_states
            case "full":
                return self.states

    def left_over(self, shard: Shard, recompute: Recompute) -> Number:
        """Bytes that are kept for recomputation and lie there, never read, until the part's backward ends."""
        if recompute != "selective" or not self.states:
            return 0
        return self._last(shard).not_read_again(shard)

    def beside_end(self, shard: Shard) -> Number:
        """Bytes that recomputation holds beside all that is kept when it makes the last of it."""
        size = self.held_states * shard.local_tokens * self.width * shard.element_bytes
        return size + sum((p.operator.beside_end(shard) for p in self.operators), 0) if self.states else 0

    def _last(self, shard: Shard) -> Operator:
        """What makes the last output: the last operator, or the one that stands around it."""
        own = [placed.operator for placed in self.operators if placed.operator.parameters()]
        return own[-2] if own[-2].backward_of_second_half(shard) else own[-1]

    def saved_bytes(self, shard: Shard, recompute: Recompute) -> Number:
        """Sum of `saved`."""
        return sum((tensor.bytes for tensor in self.saved(shard, recompute)), 0)

    def buffer_bytes(self) -> int:
        """Device memory that is neither a parameter nor in a checkpoint."""
        return sum(placed.operator.buffer_bytes() for placed in self.operators)

    def scratch_bytes(self, shard: Shard) -> tuple[Number, ...]:
        """Each operator's scratch; they do not exist together."""
        return tuple(p.operator.scratch_bytes(shard) for p in self.operators)

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        """Collectives of one micro-batch."""
        return tuple(chain.from_iterable(p.operator.transfers(shard) for p in self.operators))

    def limits(self) -> tuple[Limit, ...]:
        """What each parallel degree must divide."""
        return tuple(chain.from_iterable(p.operator.limits() for p in self.operators))


@frozen(eq=False)
class LoweredModel:
    """A model as parts, in the order that tokens pass them; equal layers are one object."""

    model: Model
    vision: Part | None
    embedding: Part
    layers: tuple[Part, ...]
    final: Part
    """Last attention-residual read, if any, and the final norm."""
    head: Part
    prediction: tuple[Part, ...] = field(default=())
    """One part per further token predicted, each with its own pass of the loss head."""

    def layer_kinds(self) -> tuple[tuple[Part, int], ...]:
        """Each kind of layer with its number of layers, in order of first appearance."""
        counts: dict[Part, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return tuple(counts.items())

    def placed_parts(self) -> Iterator[tuple[str, Part]]:
        """Every part with its module path in the generated model, in state_dict order."""
        yield "", self.embedding
        for index, layer in enumerate(self.layers):
            yield f"layers.{index}", layer
        yield "", self.final
        yield "", self.head
        if self.vision is not None:
            yield "", self.vision
        for index, part in enumerate(self.prediction):
            yield f"prediction.{index}", part

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every tensor of the generated model by its full name."""
        for path, part in self.placed_parts():
            for name, parameter in part.named_parameters():
                yield (f"{path}.{name}" if path else name), parameter

    def graph(self) -> networkx.MultiDiGraph[str]:
        """Operators as nodes; edges `data`, `residual` and `attention residual` say what reads what."""
        from shipway.compiler.operator_graph import operator_graph

        return operator_graph(self)


def lower(model: Model) -> LoweredModel:
    """Operators of a validated model; raises ValueError when its mixes do not fill its layers."""
    width = model.width
    vision = None
    if model.vision is not None:
        tower, projector = VisionTower(model.vision), Projector(model.vision, width)
        vision = Part("vision", (Placed("vision", tower), Placed("vision.projector", projector)))
    head = LossHead(model.vocabulary, width, model.tied_embeddings)
    return LoweredModel(
        model=model,
        vision=vision,
        embedding=Part("embedding", (Placed("embed", Embedding(model.vocabulary, width)),)),
        layers=_layers(model),
        final=Part("final norm", (*_final_residual(model), Placed("norm", Norm(width)))),
        head=Part("head", (Placed("head", head),)),
        prediction=_prediction(model, head),
    )


def _layers(model: Model) -> tuple[Part, ...]:
    kinds: dict[Any, Part] = {}
    layers = []
    mixes = zip(model.attention_kinds(), model.feed_forward_kinds(), strict=True)
    for index, (attention, feed_forward) in enumerate(mixes):
        sources = sources_read(model, index)
        key = (attention, feed_forward, sources)
        if key not in kinds:
            kinds[key] = _layer(model, attention, feed_forward, sources)
        layers.append(kinds[key])
    return tuple(layers)


def sources_read(model: Model, layer: int) -> tuple[int, int] | None:
    """Hidden states read before attention and before the feed-forward of a layer (arXiv 2603.15031).

    Block form: the sealed blocks, the embedding being the first, and the running sum. A block is
    sealed after the attention site of the layer that opens the next one has read it.
    """
    match model.residual.kind:
        case "plain":
            return None
        case "full":
            return 2 * layer + 1, 2 * layer + 2
        case "block":
            size = model.residual.block_layers
            return -(-layer // size) + 1, layer // size + 2


def final_sources(model: Model) -> int:
    """Hidden states read before the final norm."""
    match model.residual.kind:
        case "plain":
            return 0
        case "full":
            return 2 * model.layers + 1
        case "block":
            return -(-model.layers // model.residual.block_layers) + 1


def _layer(
    model: Model, attention: AttentionKind, feed_forward: FeedForwardKind, sources: tuple[int, int] | None
) -> Part:
    width = model.width
    before_attention: tuple[Placed, ...] = ()
    before_feed_forward: tuple[Placed, ...] = ()
    if sources is not None:
        before_attention = (Placed("attention_residual", AttentionResidual(width, sources[0])),)
        before_feed_forward = (Placed("feed_forward_residual", AttentionResidual(width, sources[1])),)
    operators = (
        *before_attention,
        Placed("attention_norm", Norm(width)),
        Placed("attention", _attention(model, attention)),
        Placed("", ResidualAdd(width)),
        *before_feed_forward,
        Placed("feed_forward_norm", Norm(width)),
        *_feed_forward(model, feed_forward),
        Placed("", ResidualAdd(width)),
    )
    name = f"{attention} attention + {feed_forward}"
    if model.residual.kind != "full":
        # A layer that opens a block leaves its input behind as a source.
        opens = sources is not None and sources[0] != sources[1]
        handed_on = 1 if sources is None else sources[1]
        return Part(
            name,
            operators,
            states=1,
            width=width,
            gradient_states=handed_on,
            held_states=0 if sources is None or opens else 1,  # attention's output, added to the running sum
            movable_states=0 if opens else 1,
        )
    # Every output stays a source; attention's is a product, the feed-forward's unless experts are summed.
    experts = model.feed_forward.experts if feed_forward == "experts" else None
    product = experts is None or (experts.latent_width is not None and not experts.shared)
    return Part(
        name,
        operators,
        states=2,
        product_states=2 if product else 1,
        width=width,
        gradient_states=1 if sources is None else sources[1] + 1,
    )


def _attention(model: Model, kind: AttentionKind) -> Operator:
    mix = model.attention
    match kind:
        case "delta" if mix.delta is not None:
            return DeltaAttention(model.width, mix.delta)
        case "latent" if mix.latent is not None:
            return LatentAttention(model.width, mix.latent, rotates(model))
        case "grouped" if mix.grouped is not None:
            return GroupedAttention(model.width, mix.grouped)
    raise ValueError(f"attention.mix names {kind} layers, but attention.{kind} is not given")


def rotates(model: Model) -> bool:
    """Whether some attention of the model has rotary positions."""
    mix, kinds = model.attention, set(model.attention_kinds())
    placed = (("latent", mix.latent), ("grouped", mix.grouped))
    return any(kind in kinds and dims is not None and dims.position.kind == "rotary" for kind, dims in placed)


def _feed_forward(model: Model, kind: FeedForwardKind) -> tuple[Placed, ...]:
    section = model.feed_forward
    match kind:
        case "dense" if section.dense_inner_width is not None:
            return (Placed("feed_forward", GatedUnit(model.width, section.dense_inner_width)),)
        case "experts" if section.experts is not None:
            return tuple(
                Placed(f"feed_forward.{path}" if path else "feed_forward", operator)
                for path, operator in mixture_of_experts(model.width, section.experts)
            )
    missing = "dense_inner_width" if kind == "dense" else "experts"
    raise ValueError(f"feed_forward.mix names {kind} layers, but feed_forward.{missing} is not given")


def _final_residual(model: Model) -> tuple[Placed, ...]:
    if model.residual.kind == "plain":
        return ()
    return (Placed("output_residual", AttentionResidual(model.width, final_sources(model))),)


def _prediction(model: Model, head: LossHead) -> tuple[Part, ...]:
    """Extra layers like the last one, plain residuals, sharing the embedding and the head."""
    if model.multi_token_prediction is None:
        return ()
    layer = _layer(model, model.attention_kinds()[-1], model.feed_forward_kinds()[-1], None)
    inner = tuple(Placed(f"layer.{p.path}" if p.path else "layer", p.operator) for p in layer.operators)
    shared = LossHead(head.vocabulary, head.width, tied=True)
    operators = (
        Placed("", PredictionInput(model.width)),
        *inner,
        Placed("norm", Norm(model.width)),
        Placed("", shared),
    )
    part = Part("multi-token prediction", operators)
    return (part,) * model.multi_token_prediction.depth
