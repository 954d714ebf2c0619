"""The training half of a blueprint: stages, optimizer, data, precision, checkpoints."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from shipway.schemas.base import Schema
from shipway.schemas.layout import LayoutConstraints
from shipway.schemas.quantities import ContextTokens, Fraction, PositiveCount, Seconds

Auto = Literal["auto"]


class CosineSchedule(Schema):
    """Linear warm-up, then half a cosine from `peak` to `final`."""

    kind: Literal["cosine"] = "cosine"
    peak: PositiveFloat
    """Highest learning rate."""
    final: NonNegativeFloat = 0.0
    """Learning rate at the stage's end."""
    warmup: Fraction = 0.01
    """Share of the stage's steps spent warming up."""


class WsdSchedule(Schema):
    """Warm-up, stable, decay (linear to `final` over the last share of steps)."""

    kind: Literal["wsd"] = "wsd"
    peak: PositiveFloat
    """Stable learning rate."""
    final: NonNegativeFloat = 0.0
    """Learning rate at the stage's end."""
    warmup: Fraction = 0.01
    """Share of the stage's steps spent warming up."""
    decay: Fraction = 0.1
    """Share of the stage's steps spent decaying."""


class ConstantSchedule(Schema):
    """Warm-up, then constant."""

    kind: Literal["constant"] = "constant"
    peak: PositiveFloat
    """Learning rate."""
    warmup: Fraction = 0.0
    """Share of the stage's steps spent warming up."""


LearningRate = Annotated[CosineSchedule | WsdSchedule | ConstantSchedule, Field(discriminator="kind")]


class PretrainStage(Schema):
    """Next-token prediction at one context length."""

    kind: Literal["pretrain"] = "pretrain"
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the stage, unique in the programme."""
    context: ContextTokens
    """Tokens in one packed sequence."""
    tokens: PositiveCount
    """Tokens trained on in this stage."""
    global_batch: PositiveCount
    """Tokens in one optimizer step, over the whole cluster; a multiple of `context`."""
    learning_rate: LearningRate
    """Learning-rate schedule of this stage."""
    mix: dict[str, NonNegativeFloat] | None = None
    """Weight of each data source by name; by default all sources of `data.sources` equally."""
    micro_batch: PositiveInt | Auto | None = None
    """Sequences per micro-batch; by default the training section's."""
    layout: LayoutConstraints | Auto = "auto"
    """Pinned parts of the layout, or auto."""

    @property
    def steps(self) -> int:
        """Optimizer steps: enough to see all tokens."""
        return -(-self.tokens // self.global_batch)


class Muon(Schema):
    """Muon on matrices, AdamW on the rest (arXiv 2502.16982; per head as in Kimi K3)."""

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    """Momentum, applied in Nesterov's form."""
    newton_schulz_steps: PositiveInt = 5
    """Newton-Schulz iterations."""
    update_rms: PositiveFloat = 0.2
    """The update is scaled by update_rms * sqrt(max(rows, columns))."""
    per_head: bool = True
    """Orthogonalise query, key and value projections head by head."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moments, for what Muon does not take."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    qk_clip: PositiveFloat | None = 100.0
    """Attention-logit threshold of QK-clip on latent-attention heads; null turns it off."""


class AdamW(Schema):
    """AdamW (arXiv 1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the moments."""
    eps: PositiveFloat = 1e-8
    """Epsilon."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only."""


Optimizer = Annotated[Muon | AdamW, Field(discriminator="kind")]


class Precision(Schema):
    """Number formats."""

    compute: Literal["bf16", "fp32", "fp8"] = "bf16"
    """Forward and backward. fp8: as bf16, but for the large projections of attentions, gated units and
    latents, whose products run in fp8 with a scale per row (torchao); all else stays in bf16, experts too."""
    fp8_smallest: PositiveInt = 2048
    """With fp8, projections narrower than this, in or out, stay in bf16: rounding their operands takes
    longer than the faster product saves."""
    master: Literal["fp32", "bf16"] = "fp32"
    """Sharded parameters that the optimizer updates."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Gradient reduction and accumulation."""
    optimizer: Literal["fp32", "bf16"] = "fp32"
    """Optimizer moments."""

    @property
    def activations(self) -> Literal["bf16", "fp32"]:
        """Format of activations and of gathered weights: fp8 is that of products' operands alone."""
        return "fp32" if self.compute == "fp32" else "bf16"


Compilation = Literal["auto", "none", "blocks"]


class BytesTokenizer(Schema):
    """UTF-8 bytes as tokens 0 to 255, then begin, end and padding."""

    kind: Literal["bytes"] = "bytes"


class FileTokenizer(Schema):
    """A Hugging Face `tokenizer.json`."""

    kind: Literal["file"] = "file"
    path: str
    """Path, relative to the blueprint."""
    end_of_document: str | None = None
    """Token put after each document; by default the file's own end token."""


class PythonStdlibSource(Schema):
    """The Python standard library's own source: text that is on every machine."""

    kind: Literal["python_stdlib"] = "python_stdlib"


class FilesSource(Schema):
    """The user's .txt, .jsonl or .parquet files, or folders of them."""

    kind: Literal["files"] = "files"
    path: str
    """File or folder, relative to the blueprint, or a URL that fsspec knows (s3://bucket/folder)."""
    text_field: str = "text"
    """Field that holds the text in .jsonl and .parquet."""
    documents: Literal["file", "line"] = "file"
    """What one document of a .txt file is: the whole file (in parts of about 4 MiB), or a line."""


class PackedSource(Schema):
    """Tokens that `shipway data pack` wrote: memory-mapped shards with an index of documents."""

    kind: Literal["packed"] = "packed"
    path: str
    """Folder of .bin and .idx files, relative to the blueprint, or a URL."""


class HuggingFaceSource(Schema):
    """A Hugging Face dataset that `save_to_disk` wrote."""

    kind: Literal["hugging_face"] = "hugging_face"
    path: str
    """Folder, relative to the blueprint."""
    split: str | None = None
    """Split, when the folder holds several."""
    text_field: str = "text"
    """Field that holds the text."""


class ImagesSource(Schema):
    """A folder of PNG and JPEG pictures with captions: in `captions.jsonl`, or in a .txt beside each."""

    kind: Literal["images"] = "images"
    path: str
    """Folder, relative to the blueprint, or a URL."""
    largest_tokens: PositiveCount = 1024
    """Tokens above which a picture is scaled down; below, it is read at its own resolution."""


class RenderedTextSource(Schema):
    """Pictures of words that Shipway draws itself, with the words as caption: needs no files."""

    kind: Literal["rendered_text"] = "rendered_text"
    pictures: PositiveCount = 10_000
    """Pictures in an epoch."""
    seed: int = Field(default=0, ge=0)
    """Seed of what they say."""
    lines: PositiveInt = 4
    """Most lines of words on a picture."""
    words: PositiveInt = 3
    """Most words on a line."""
    largest_tokens: PositiveCount = 1024
    """Tokens above which a picture is scaled down."""


Source = Annotated[
    PythonStdlibSource | FilesSource | PackedSource | HuggingFaceSource | ImagesSource | RenderedTextSource,
    Field(discriminator="kind"),
]


class Data(Schema):
    """Where tokens come from."""

    tokenizer: Annotated[BytesTokenizer | FileTokenizer, Field(discriminator="kind")] = (
        BytesTokenizer.by_default()
    )
    """Tokenizer."""
    sources: dict[str, Source] = Field(default={"stdlib": PythonStdlibSource.by_default()}, min_length=1)
    """Data sources by name; a stage's `mix` weighs them."""
    held_out: Fraction = 0.01
    """Share of documents kept for evaluation."""
    corrupt_limit: Fraction = 0.001
    """Share of records that may be unreadable before training stops."""
    interleave: PositiveInt = 64
    """Documents of a source that are read side by side, each row going on with one of them drawn by the
    seed, so that a long document does not fill whole batches; 1 reads one document after the other."""

    def has_images(self, mix: Mapping[str, float] | None) -> bool:
        """Whether a stage of these weights reads images; None weighs all sources equally."""
        read = [name for name in self.sources if mix is None or mix.get(name, 0) > 0]
        return any(isinstance(self.sources[name], ImagesSource | RenderedTextSource) for name in read)

    def relative_paths(self) -> tuple[str, ...]:
        """Paths of the tokenizer and the sources that start from the blueprint's folder."""
        named = [getattr(item, "path", None) for item in (self.tokenizer, *self.sources.values())]
        return tuple(p for p in named if p is not None and "://" not in p and not p.startswith(("/", "~")))


class Checkpoints(Schema):
    """When and where state is saved."""

    every_steps: PositiveInt = 500
    """Optimizer steps between saves."""
    keep_last: PositiveInt = 3
    """Finished checkpoints kept."""
    asynchronous: bool = True
    """Write in the background while training goes on."""


class Evaluation(Schema):
    """Held-out loss."""

    every_steps: PositiveInt = 500
    """Optimizer steps between evaluations."""
    sequences: PositiveInt = 32
    """Held-out sequences read each time, over the whole cluster."""
    short_loss_bound: Fraction = 0.05
    """Share by which the held-out loss of a document's first 128 tokens may rise from one stage's end to
    the next."""
    beyond_bound: Literal["warn", "stop"] = "warn"
    """What happens when it rises more."""


class Faults(Schema):
    """What the runtime does when something goes wrong."""

    non_finite: Literal["skip", "rollback", "stop"] = "skip"
    """When the loss or the gradient norm is not finite: leave the update out, go back to the last
    checkpoint and read on behind the bad step, or stop."""
    non_finite_limit: PositiveInt = 5
    """Bad steps in a row, or roll-backs without a finished checkpoint between them, that stop the run."""
    hang_factor: PositiveFloat = 20.0
    """A step of this many times the median is taken for a hang: stacks are dumped, the run restarts."""
    hang_minimum: Seconds = 600.0
    """No step is taken for a hang before this time."""
    restarts: PositiveInt = 20
    """Times the supervisor starts a run again by itself."""


class Ema(Schema):
    """Exponential moving average of the weights, in fp32: what is evaluated, generated from and exported."""

    decay: Fraction = 0.999
    """Share of the average that a step keeps; the rest is the weights after that step."""


class WeightsAndBiases(Schema):
    """A Weights & Biases project that gets the same scalars as TensorBoard (the `wandb` extra)."""

    project: str = Field(min_length=1)
    """Project."""
    entity: str | None = None
    """User or team; by default the one that the API key belongs to."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run's folder, for `wandb sync`."""


class Observability(Schema):
    """What is shown of a run besides metrics.jsonl and TensorBoard."""

    details_every_steps: PositiveInt = 50
    """Optimizer steps between records of each expert's hits, each layer's activations and gradients, and
    each rank's speed."""
    slow_rank_factor: PositiveFloat = 1.3
    """A rank whose device takes this many times the median for the same work is named, with its host."""
    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of rank 0's host where Prometheus finds the latest figures; 0 takes a free one and says which."""
    weights_and_biases: WeightsAndBiases | None = None
    """Where to send scalars besides; nothing is sent unless this is set."""


class Training(Schema):
    """The whole programme."""

    stages: tuple[PretrainStage, ...] = Field(min_length=1)
    """Training stages, in order."""
    optimizer: Optimizer = Muon.by_default()
    """Optimizer."""
    precision: Precision = Precision.by_default()
    """Number formats."""
    data: Data = Data.by_default()
    """Data."""
    checkpoints: Checkpoints = Checkpoints.by_default()
    """Checkpoints."""
    evaluation: Evaluation = Evaluation.by_default()
    """Evaluation."""
    micro_batch: PositiveInt | Auto = "auto"
    """Sequences per micro-batch of one data-parallel rank, in every stage that does not say its own."""
    layout: LayoutConstraints | Auto = "auto"
    """Pinned parts of the layout, in every stage that does not pin them itself."""
    faults: Faults = Faults.by_default()
    """Non-finite values, hangs, restarts."""
    ema: Ema | None = None
    """Moving average of the weights; none by default."""
    observability: Observability = Observability.by_default()
    """Details, Prometheus, Weights & Biases."""
    compile: Compilation = "auto"
    """torch.compile on attentions, gated units and vision layers: `blocks` or `none`; auto goes by the
    device, and `shipway doctor` says what it chooses and why. With fp8 auto compiles them."""
    gradient_clip: PositiveFloat | None = 1.0
    """Largest global gradient norm; null turns clipping off."""
    seed: int = Field(default=0, ge=0)
    """Seed of initialisation and data order."""
    objective: Literal["time", "cost", "memory"] = "time"
    """What the layout search minimises: step time, cost, or peak memory."""

    @property
    def compiles_blocks(self) -> bool:
        """Whether blocks are compiled on a GPU."""
        return self.compile == "blocks" or (self.compile == "auto" and self.precision.compute == "fp8")

    def stage(self, name: str) -> PretrainStage:
        """The stage of this name; a plan's stages all have one."""
        return next(stage for stage in self.stages if stage.name == name)
