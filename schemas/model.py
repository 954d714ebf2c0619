"""The architecture half of a blueprint: what is trained.

Letters in docstrings: D model width, H heads, K key head width, V value head width, E routed
experts, k experts per token, L latent width of the experts, F expert inner width.
"""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag

from shipway.schemas.base import Schema
from shipway.schemas.quantities import ContextTokens, Count, PositiveCount

AttentionKind = Literal["delta", "latent", "grouped"]
FeedForwardKind = Literal["dense", "experts"]
Kind = TypeVar("Kind", AttentionKind, FeedForwardKind)


class LayerPattern(Schema, Generic[Kind]):
    """Which kind each layer is, from the first: `head`, then `pattern` repeated, then `tail`."""

    pattern: tuple[Kind, ...] = Field(min_length=1)
    """Kinds repeated over the layers that `head` and `tail` leave; must fit a whole number of times."""
    head: tuple[Kind, ...] = ()
    """Kinds of the first layers, before the pattern starts."""
    tail: tuple[Kind, ...] = ()
    """Kinds of the last layers, after the pattern has ended."""


def _mix_form(value: object) -> str:
    return "list" if isinstance(value, (list, tuple)) else "pattern"


AttentionMix = Annotated[
    Annotated[LayerPattern[AttentionKind], Tag("pattern")]
    | Annotated[tuple[AttentionKind, ...], Tag("list")],
    Discriminator(_mix_form),
]
FeedForwardMix = Annotated[
    Annotated[LayerPattern[FeedForwardKind], Tag("pattern")]
    | Annotated[tuple[FeedForwardKind, ...], Tag("list")],
    Discriminator(_mix_form),
]


class BoundedDecay(Schema):
    """g = minimum * sigmoid(exp(A) * z): sixteen tokens stay inside bf16's range (Kimi K3, 2.1.1)."""

    kind: Literal["bounded"] = "bounded"
    minimum: float = Field(default=-5.0, lt=0)
    """Lower bound of the log-decay of one token."""


class UnboundedDecay(Schema):
    """g = -exp(A) * softplus(z), the older form (Kimi Linear, arXiv 2510.26692)."""

    kind: Literal["unbounded"] = "unbounded"


class DeltaAttention(Schema):
    """Kimi Delta Attention (arXiv 2510.26692): a gated delta rule with a decay per key channel."""

    heads: PositiveInt
    """Query and key heads, H."""
    value_heads: PositiveInt | None = None
    """Value heads when they outnumber query heads (a multiple of `heads`); by default `heads`."""
    key_width: PositiveInt = 128
    """Width K of one query or key head."""
    value_width: PositiveInt = 128
    """Width V of one value head."""
    convolution_width: int = Field(default=4, ge=2)
    """Taps of the causal depthwise convolution on q, k and v."""
    decay: Annotated[BoundedDecay | UnboundedDecay, Field(discriminator="kind")] = BoundedDecay.by_default()
    """How the decay is formed."""
    decay_rank: PositiveInt = 128
    """Rank of the two-matrix projection that gives the decay logits."""
    output_gate: Literal["full", "low_rank"] = "full"
    """Gate projection: one D x HV matrix, or D x V x HV."""
    output_gate_bias: bool = False
    """Whether the gate projection (its second matrix when low-rank) has a bias."""
    chunk: Literal[32, 64] = 64
    """Tokens handled as one dense block by the chunkwise algorithm."""


class NoPosition(Schema):
    """No positional signal in this attention."""

    kind: Literal["none"] = "none"


class Yarn(Schema):
    """YaRN context extension (arXiv 2309.00071)."""

    factor: PositiveFloat
    """Ratio of the extended to the original context."""
    original_context: ContextTokens
    """Context length of the first training."""
    beta_fast: PositiveFloat = 32.0
    """Rotations above which a channel is left as it is."""
    beta_slow: PositiveFloat = 1.0
    """Rotations below which a channel is fully interpolated."""
    attention_scale: PositiveFloat = 1.0
    """mscale: the factor m in 0.1 * m * ln(factor) + 1, applied to the softmax scale squared."""


class RotaryPosition(Schema):
    """Rotary position embedding (arXiv 2104.09864)."""

    kind: Literal["rotary"] = "rotary"
    theta: PositiveFloat = 10000.0
    """Base of the wavelengths."""
    yarn: Yarn | None = None
    """Context extension, if any."""


Position = Annotated[NoPosition | RotaryPosition, Field(discriminator="kind")]


class LatentAttention(Schema):
    """Gated multi-head latent attention (arXiv 2405.04434; gate: arXiv 2505.06708)."""

    heads: PositiveInt
    """Attention heads, H."""
    query_rank: PositiveInt | None = None
    """Rank of the query's low-rank projection; null projects straight from the model width."""
    kv_rank: PositiveInt = 512
    """Latent rank: the width that is cached for keys and values."""
    nope_width: PositiveInt = 128
    """Key width per head that comes from the latent, K_n."""
    rope_width: int = Field(default=64, ge=0)
    """Key width shared by all heads, K_r; rotated when `position` is rotary, else used as it is."""
    value_width: PositiveInt = 128
    """Value width per head."""
    position: Position = NoPosition.by_default()
    """Positional signal on the shared part of the key."""
    output_gate: Literal["none", "elementwise", "per_head"] = "elementwise"
    """Sigmoid gate on the attention output, from the layer's input."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of the norms on the query and key-value latents; by default the model's."""


class GroupedAttention(Schema):
    """Grouped-query attention (arXiv 2305.13245)."""

    heads: PositiveInt
    """Query heads."""
    kv_heads: PositiveInt
    """Key and value heads; divides `heads`."""
    head_width: PositiveInt = 128
    """Width of one head."""
    position: Position = RotaryPosition.by_default()
    """Positional signal on queries and keys."""
    query_key_norm: bool = False
    """RMSNorm per head on queries and keys (as Qwen3)."""
    bias: bool = False
    """Bias on the query, key and value projections."""
    output_gate: Literal["none", "elementwise", "per_head"] = "none"
    """Sigmoid gate on the attention output, from the layer's input."""


class Attention(Schema):
    """The attention mix and the dimensions of each kind in it."""

    mix: AttentionMix
    """Which layer has which attention: a pattern, or the whole list."""
    delta: DeltaAttention | None = None
    """Dimensions of the delta-attention layers."""
    latent: LatentAttention | None = None
    """Dimensions of the latent-attention layers."""
    grouped: GroupedAttention | None = None
    """Dimensions of the grouped-query layers."""


class SituActivation(Schema):
    """SiTU-GLU: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta) (Kimi K3, Eq. 12)."""

    kind: Literal["situ"] = "situ"
    beta: PositiveFloat = 4.0
    """Soft cap of the gate half."""
    linear_beta: PositiveFloat | None = 25.0
    """Soft cap of the linear half; null leaves it uncapped."""


class SwigluActivation(Schema):
    """SwiGLU: silu(gate) * up (arXiv 2002.05202)."""

    kind: Literal["swiglu"] = "swiglu"


Activation = Annotated[SituActivation | SwigluActivation, Field(discriminator="kind")]


class QuantileBalancing(Schema):
    """The bias is the (1 - k/E) quantile of score margins, set anew every step (Kimi K3, 2.3.3)."""

    kind: Literal["quantile"] = "quantile"
    estimator: Literal["histogram", "exact"] = "histogram"
    """From an all-reduced histogram of margins, or from the gathered margins themselves."""
    bins: int = Field(default=1000, ge=10)
    """Bins of the histogram."""


class BiasBalancing(Schema):
    """Auxiliary-loss-free bias moved by the sign of each expert's overload (DeepSeek-V3, 2.1.2)."""

    kind: Literal["bias"] = "bias"
    rate: PositiveFloat = 1e-3
    """Step of the bias per optimizer step."""


class AuxiliaryBalancing(Schema):
    """Load-balancing loss of every sequence (Switch Transformer, arXiv 2101.03961, Eq. 4), added to the
    training loss in proportion to the tokens that count in it."""

    kind: Literal["auxiliary"] = "auxiliary"
    weight: PositiveFloat = 1e-3
    """Weight of the auxiliary loss."""


class NoBalancing(Schema):
    """Nothing balances the experts' load."""

    kind: Literal["none"] = "none"


Balancing = Annotated[
    QuantileBalancing | BiasBalancing | AuxiliaryBalancing | NoBalancing, Field(discriminator="kind")
]


class Experts(Schema):
    """Mixture of experts; with `latent_width` it is LatentMoE (arXiv 2601.18089; Kimi K3, Eq. 11)."""

    routed: int = Field(ge=2)
    """Routed experts, E."""
    active: PositiveInt
    """Routed experts per token, k."""
    inner_width: PositiveInt
    """Inner width of one routed expert, F."""
    latent_width: PositiveInt | None = None
    """Width L that routed experts work in; null lets them work at the model width."""
    latent_norm: bool = True
    """RMSNorm after combining, before the up-projection (only with `latent_width`)."""
    router_input: Literal["hidden", "latent"] = "hidden"
    """What the router reads: the full-width hidden state, or the down-projected latent."""
    shared: int = Field(default=0, ge=0)
    """Shared experts, which every token passes at the full width."""
    shared_inner_width: PositiveInt | None = None
    """Inner width of one shared expert; by default `inner_width`."""
    shared_gate: bool = False
    """Sigmoid gate (D to 1) on the shared experts' output."""
    scores: Literal["sigmoid", "softmax"] = "sigmoid"
    """Function from router logits to scores."""
    renormalize: bool = True
    """Whether the chosen experts' weights are made to sum to one."""
    scale: PositiveFloat = 1.0
    """Factor on the mixture weights (routed scaling factor)."""
    groups: PositiveInt = 1
    """Groups of experts for group-limited top-k."""
    active_groups: PositiveInt = 1
    """Groups a token may choose from."""
    balancing: Balancing = QuantileBalancing.by_default()
    """What keeps the load even."""


class FeedForward(Schema):
    """The feed-forward mix and the dimensions of each kind in it."""

    mix: FeedForwardMix
    """Which layer has which feed-forward: a pattern, or the whole list."""
    dense_inner_width: PositiveInt | None = None
    """Inner width of the dense layers."""
    experts: Experts | None = None
    """The mixture of experts of the other layers."""
    activation: Activation = SwigluActivation.by_default()
    """Gated unit used in dense, routed and shared feed-forwards alike."""


class PlainResidual(Schema):
    """x + f(norm(x))."""

    kind: Literal["plain"] = "plain"


class FullAttentionResidual(Schema):
    """Every sublayer reads a softmax over all earlier sublayers' outputs (arXiv 2603.15031)."""

    kind: Literal["full"] = "full"


class BlockAttentionResidual(Schema):
    """Every sublayer reads a softmax over finished blocks and the running sum (arXiv 2603.15031)."""

    kind: Literal["block"] = "block"
    block_layers: PositiveInt = 12
    """Layers in one block (the paper and fla count sublayers: twice this)."""


Residual = Annotated[
    PlainResidual | FullAttentionResidual | BlockAttentionResidual, Field(discriminator="kind")
]


class Vision(Schema):
    """Native-resolution vision encoder in the manner of MoonViT-V2, with its projector."""

    layers: PositiveInt = 27
    """Encoder layers."""
    width: PositiveInt = 1024
    """Encoder width."""
    heads: PositiveInt = 12
    """Attention heads."""
    head_width: PositiveInt = 128
    """Width of one head."""
    inner_width: PositiveInt = 4096
    """Inner width of the two-matrix MLP."""
    patch: PositiveInt = 14
    """Side of a patch in pixels."""
    position_grid: PositiveInt = 64
    """Side of the learned position grid, interpolated to the image."""
    merge: PositiveInt = 2
    """Side of the pixel-shuffle merge: merge * merge patches become one token."""
    projector_width: PositiveInt = 4096
    """Inner width of the projector to the model width."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How the position grid is stretched to an image's own grid."""
    image_token: Count | None = None
    """Token id that stands where an image's embeddings go; by default the last of the vocabulary."""


class MultiTokenPrediction(Schema):
    """Extra layers that predict further tokens in training (DeepSeek-V3, 2.2)."""

    depth: PositiveInt = 1
    """Further tokens predicted, one extra layer each."""
    loss_weight: PositiveFloat = 0.3
    """Weight of their loss."""


class Model(Schema):
    """A decoder-only model."""

    vocabulary: PositiveCount
    """Rows of the embedding table and of the head."""
    width: PositiveInt
    """Model width, D."""
    layers: PositiveInt
    """Decoder layers."""
    attention: Attention
    """Attention mix."""
    feed_forward: FeedForward
    """Feed-forward mix."""
    residual: Residual = PlainResidual.by_default()
    """How sublayers are joined over depth."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    tied_embeddings: bool = False
    """Whether the head reuses the embedding table."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weight matrices."""
    vision: Vision | None = None
    """Vision tower, if the model sees images."""
    multi_token_prediction: MultiTokenPrediction | None = None
    """Multi-token prediction, if any."""

    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The attention kind of every layer, first to last; meaningful once `validate` has passed."""
        return expand_mix(self.attention.mix, self.layers)

    def feed_forward_kinds(self) -> tuple[FeedForwardKind, ...]:
        """The feed-forward kind of every layer, first to last; meaningful once `validate` has passed."""
        return expand_mix(self.feed_forward.mix, self.layers)


def expand_mix(mix: LayerPattern[Kind] | tuple[Kind, ...], layers: int) -> tuple[Kind, ...]:
    """The kind of each of `layers` layers; raises ValueError when the mix does not fill them exactly."""
    if isinstance(mix, tuple):
        if len(mix) != layers:
            raise ValueError(f"the list names {len(mix)} layers, the model has {layers}")
        return mix
    middle = layers - len(mix.head) - len(mix.tail)
    if middle < 0 or middle % len(mix.pattern):
        raise ValueError(
            f"a pattern of {len(mix.pattern)} does not fill the {middle} layers that are left of {layers}"
            f" after a head of {len(mix.head)} and a tail of {len(mix.tail)}"
        )
    return mix.head + mix.pattern * (middle // len(mix.pattern)) + mix.tail
