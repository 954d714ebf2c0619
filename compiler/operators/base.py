"""What every operator of the catalogue states about itself, once.

An operator is built from the blueprint's model section alone. Everything that depends on the layout
takes a `Shard`, whose numbers may be ints or numpy arrays: the search evaluates all layouts of a
stage in one call, so operators use plain arithmetic and numpy functions only, never `if` on a
sharded number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step
from shipway.schemas.layout import Recompute

Number: TypeAlias = Any
"""An int, a float or a numpy array of them."""

Sharding = Literal["replicated", "column", "row", "vocabulary", "expert"]
"""How tensor or expert parallel divides a parameter.

column, vocabulary: dimension 0 over tp; row: dimension 1 over tp; expert: dimension 0 over ep (tp
divides no expert); replicated: neither. FSDP shards dimension 0 of what is left, over dp_shard x cp
(experts: over expert_shard).
"""


@frozen
class Parameter:
    """One tensor of the generated module, named as in its `state_dict`, relative to the operator."""

    name: str
    shape: tuple[int, ...]
    sharding: Sharding = "replicated"
    optimizer: Literal["muon", "adamw", "none"] = "adamw"
    """`none`: a buffer that no gradient reaches, such as the balancing bias."""
    muon_heads: int = 1
    """Row blocks that Muon orthogonalises apart (heads); leading dimension of experts is always apart."""
    active_fraction: Fraction = Fraction(1)
    """Share of the tensor that one text token passes: k/E for routed experts, 0 for a vision tower."""
    fp32: bool = False
    """Kept in fp32 whatever the compute precision (A_log, router, balancing bias)."""
    fp8: bool = False
    """A projection whose products may run in fp8, if it is large enough (operators/fp8.py)."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def active(self) -> int:
        """Elements that one text token passes."""
        return int(self.count * self.active_fraction)


Implementation = Literal["fused", "plain"]
"""fused: the kernels of CUDA devices (fla-core 0.6.0, flash attention); plain: PyTorch everywhere else."""


@frozen
class Shard:
    """The part of one micro-batch that one rank works on."""

    sequences: Number
    """Sequences in the micro-batch (per data-parallel rank)."""
    context: Number
    """Tokens of one whole sequence."""
    tensor: Number = 1
    context_parallel: Number = 1
    expert: Number = 1
    imbalance: float = 1.0
    """Largest over mean load of an expert-parallel rank, at the stated percentile."""
    element_bytes: int = 2
    """Bytes of an activation: 2 in bf16, 4 in fp32."""
    patches: Number = 0
    """Image patches in the micro-batch's whole rows, which ranks of tp x cp share picture by picture."""
    patches_per_image: Number = 1024
    """Patches of one image: attention in the vision tower does not cross images."""
    delta_heads: Number = 0
    """1 where context parallel exchanges heads of delta attention, 0 where it passes states."""
    implementation: Implementation = "fused"
    """Kernels that run: they differ in what they keep for backward and in their temporaries."""
    fp8_smallest: int | None = None
    """Narrowest projection, in or out, whose products run in fp8; None where none does."""
    casts_fused: bool = True
    """Whether rounding to fp8 is compiled."""

    @property
    def tokens(self) -> Number:
        """Tokens of the micro-batch on this rank's slice of the context, which tensor parallel shares."""
        return self.sequences * self.context / self.context_parallel

    @property
    def local_tokens(self) -> Number:
        """Tokens between tensor-parallel regions, where sequence parallel has divided them by `tensor`."""
        return self.tokens / self.tensor


@frozen
class Gemm:
    """`groups` products of rows x inner by inner x columns: 2 rows inner columns groups FLOPs forward."""

    name: str
    rows: Number
    inner: Number
    columns: Number
    groups: Number = 1
    grouped: bool = False
    """One grouped kernel over all groups (experts), rather than one product."""
    input_gradient: bool = True
    """Whether backward needs the gradient of the input (not for the first layer of pixels)."""
    gradients_in_forward: bool = False
    """Whether both gradients are formed in forward already, as the fused loss head does."""
    fp8: bool = False
    """Whether its three products, forward and backward, take operands in fp8."""
    parts: int = 1
    """Products in bf16 that stand for it where the compute precision is bf16 and an operand is in fp32."""


@frozen
class Attention:
    """Softmax attention: `batch` x `heads`, `queries` by `keys`, causal halves the work."""

    name: str
    batch: Number
    heads: Number
    queries: Number
    keys: Number
    key_width: int
    value_width: int
    causal: bool = True


@frozen
class DeltaRule:
    """Chunkwise gated delta rule over `tokens` x `heads` (arXiv 2510.26692, Eq. 6 to 9)."""

    name: str
    tokens: Number
    heads: Number
    key_width: int
    value_width: int
    chunk: int
    bounded: bool
    sequences: Number = 1


@frozen
class Elementwise:
    """Memory-bound work: bytes read and written, forward and backward, in `kernels` launches."""

    name: str
    forward_bytes: Number
    backward_bytes: Number
    kernels: int = 1


@frozen
class Cast:
    """Operands of fp8 products, scaled and rounded: these very bytes, in `kernels` launches forward."""

    name: str
    forward_bytes: Number
    backward_bytes: Number
    kernels: int


Kernel = Gemm | Attention | DeltaRule | Elementwise | Cast


@frozen
class Saved:
    """A tensor kept from forward to backward, for one micro-batch on one rank."""

    name: str
    bytes: Number


@frozen
class Transfer:
    """A collective that the operator itself causes, per micro-batch, in one direction of the pass."""

    name: str
    axis: Literal["tp", "cp", "ep"]
    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_receive"]
    bytes: Number
    """all_gather, reduce_scatter, all_reduce: the whole tensor over the group, for one rank's share of
    other axes; all_to_all, send_receive: what one rank sends."""
    phase: Literal["forward", "backward"]
    calls: Number = 1
    """Calls of `bytes` each."""
    again: Number = 1
    """Times that recomputation issues it: 0 where its layer keeps nothing that is made after it, so that
    recomputation ends before."""
    under: tuple[Kernel, ...] = ()
    """Work that the runtime does while it travels."""

    def repeats(self, recompute: Recompute) -> Number:
        """Times that backward issues it again; kept products spare no collective around them."""
        return self.again if recompute != "none" and self.phase == "forward" else 0


@frozen
class Limit:
    """A parallel degree must divide `value`, or the operator can't be cut that way."""

    axis: Literal["tp", "ep"]
    what: str
    """What is divided, in the user's words, such as `key-value heads`."""
    value: int


@frozen
class DecodeState:
    """What generation keeps per sequence."""

    bytes_per_token: int
    """Grows with the context (latent or key-value cache), at two bytes an element."""
    constant_bytes: int
    """Does not grow (delta state in fp32, convolution tails)."""


def keeps_delta(implementation: Implementation) -> bool:
    """Whether selective recomputation keeps what the delta rule puts out, as it does of softmax attention.

    It keeps outputs of operators that torch knows (runtime/parallel/recompute.py); fla's chunk kernel is
    none, so it runs again.
    """
    return implementation == "plain"


class Operator(ABC):
    """One block of the model, as the planner sees it; what an operator does not state, it does not have."""

    block: str
    """Name in the parameter table, such as `delta attention`."""

    @abstractmethod
    def parameters(self) -> tuple[Parameter, ...]:
        """Every tensor of the generated module's state_dict."""

    @abstractmethod
    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        """Forward work of one micro-batch on one rank; backward follows from each kernel's kind."""

    @abstractmethod
    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        """Tensors kept from forward to backward under a recomputation policy.

        Every tensor has one owner: an operator states its input if it keeps it, never its output.
        Under `full` a layer keeps only its own input, which `LayerKind.saved` states.
        """

    def recomputed(self, shard: Shard, recompute: Recompute) -> tuple[Kernel, ...]:
        """Kernels that backward runs again before their gradients."""
        match recompute:
            case "none":
                return ()
            case "full":
                return self.kernels(shard)
            case "selective":
                again = Elementwise if keeps_delta(shard.implementation) else Elementwise | DeltaRule
                return tuple(kernel for kernel in self.kernels(shard) if isinstance(kernel, again))

    def buffer_bytes(self) -> int:
        """Device memory that is neither a parameter nor in a checkpoint, on every rank."""
        return 0

    def scratch_bytes(self, shard: Shard) -> Number:
        """Largest temporary memory beyond inputs, outputs and saved tensors, in forward or backward, of an
        operator outside the layers."""
        return 0

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        """Operations of backward in order, from the gradient of the output to that of the input.

        All that is kept without recomputation is there at the beginning and gone at the end. The gradient of
        the output is freed, unless the operator ends a sublayer: then the residual path holds it too.
        """
        return (Step("all", self.scratch_bytes(shard), self.scratch_bytes(shard)),)

    def backward_of_second_half(self, shard: Shard) -> tuple[Step, ...]:
        """Of an operator around the one that follows it: what stands before that one's backward."""
        return ()

    @property
    def reduced_apart(self) -> bool:
        """Whether FSDP reduces its gradients as soon as they are made, rather than with the layer's."""
        return False

    def beside_end(self, shard: Shard) -> Number:
        """Bytes that are there and not kept when a layer's last operator makes the last tensor that is."""
        return 0

    def not_read_again(self, shard: Shard) -> Number:
        """Bytes that selective recomputation keeps of an operator that ends a layer and never reads:
        recomputation stops at the last tensor that backward needs."""
        return 0

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        """Collectives of one micro-batch, forward and backward, as if every axis were larger than one."""
        return ()

    def limits(self) -> tuple[Limit, ...]:
        """What each parallel degree must divide."""
        return ()

    def decode_state(self) -> DecodeState:
        """Generation state of one sequence."""
        return DecodeState(0, 0)


@frozen
class Flops:
    """Floating-point operations of one micro-batch on one rank, matrix products only."""

    forward: Number
    backward: Number


def forward_flops(kernel: Kernel) -> Number:
    """Matrix-product FLOPs of one kernel's forward; elementwise work counts none.

    Causal attention counts the lower triangle; the delta rule counts 6K V + 3C(K+V)/2 + C^2 per
    token and head (arXiv 2510.26692, Eq. 13, at K = V).
    """
    match kernel:
        case Gemm():
            return 2 * kernel.rows * kernel.inner * kernel.columns * kernel.groups
        case Attention():
            work = 2 * kernel.batch * kernel.heads * kernel.queries * kernel.keys
            return work * (kernel.key_width + kernel.value_width) * (0.5 if kernel.causal else 1.0)
        case DeltaRule():
            state = 6 * kernel.key_width * kernel.value_width
            chunk = 3 * kernel.chunk * (kernel.key_width + kernel.value_width) / 2 + kernel.chunk**2
            return kernel.tokens * kernel.heads * (state + chunk)
        case Elementwise() | Cast():
            return 0


def backward_flops(kernel: Kernel) -> Number:
    """Matrix-product FLOPs of one kernel's backward, without recomputation."""
    forward = forward_flops(kernel)
    if isinstance(kernel, Gemm) and not kernel.input_gradient:
        return forward
    return 2 * forward


def flops(kernels: tuple[Kernel, ...]) -> Flops:
    """FLOPs of a list of kernels."""
    return Flops(
        forward=sum(forward_flops(kernel) for kernel in kernels),
        backward=sum(backward_flops(kernel) for kernel in kernels),
    )
