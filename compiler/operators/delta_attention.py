"""Kimi Delta Attention: a gated delta rule with a decay per key channel (arXiv 2510.26692)."""

from __future__ import annotations

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step, total
from shipway.compiler.operators.base import (
    DecodeState,
    Elementwise,
    Kernel,
    Limit,
    Number,
    Operator,
    Parameter,
    Saved,
    Shard,
    Transfer,
)
from shipway.compiler.operators.delta_core import DeltaCore
from shipway.compiler.operators.linear import (
    gemm,
    into_sequence_parallel,
    joint_sum,
    norm_weight,
    out_of_sequence_parallel,
    product_backward,
    sequence_parallel,
    weight,
)
from shipway.compiler.operators.norm import norm_backward, norm_saved
from shipway.schemas.layout import Recompute
from shipway.schemas.model import DeltaAttention as DeltaAttentionSchema

STATE_BYTES = 4
"""The recurrent state is fp32."""
CONVOLUTION = (3.2, 6.9)
"""Passes over the convolved channels, forward and backward, that the kernel takes as long as on an H200
(runtime/kernels/convolution_triton.py; fla-core 0.6's takes 2.9 and 17); reading and writing once would be 2
and 3."""
CONVOLUTION_BLOCK = 64
"""Tokens whose part of a convolution weight's gradient is summed apart."""
READERS = 6
"""Of a layer's input: query, key, value, decay, beta and gate."""


@frozen
class DeltaAttention(Operator):
    """One layer's delta attention; tensor parallel cuts heads, context parallel passes states or exchanges
    heads."""

    width: int
    dims: DeltaAttentionSchema
    block: str = "delta attention"

    @property
    def value_heads(self) -> int:
        return self.dims.value_heads or self.dims.heads

    @property
    def key_channels(self) -> int:
        return self.dims.heads * self.dims.key_width

    @property
    def value_channels(self) -> int:
        return self.value_heads * self.dims.value_width

    @property
    def decay_channels(self) -> int:
        return self.value_heads * self.dims.key_width

    @property
    def core(self) -> DeltaCore:
        """The delta rule itself."""
        dims, bounded = self.dims, self.dims.decay.kind == "bounded"
        return DeltaCore(dims.heads, self.value_heads, dims.key_width, dims.value_width, dims.chunk, bounded)

    def parameters(self) -> tuple[Parameter, ...]:
        dims, heads = self.dims, self.dims.heads
        keys, values, decays = self.key_channels, self.value_channels, self.decay_channels
        return (
            weight("q_proj", keys, self.width, "column", heads=heads),
            weight("k_proj", keys, self.width, "column", heads=heads),
            weight("v_proj", values, self.width, "column", heads=self.value_heads),
            Parameter("q_conv.weight", (keys, dims.convolution_width), "column"),
            Parameter("k_conv.weight", (keys, dims.convolution_width), "column"),
            Parameter("v_conv.weight", (values, dims.convolution_width), "column"),
            # The state multiplies decays over the whole context: rounding them would add up.
            weight("decay_down", dims.decay_rank, self.width, fp8=False),
            weight("decay_up", decays, dims.decay_rank, "column", fp8=False),
            Parameter("dt_bias", (decays,), "column", fp32=True),
            Parameter("a_log", (self.value_heads,), "column", fp32=True),
            weight("beta_proj", self.value_heads, self.width, "column", optimizer="adamw"),
            *self._gate_parameters(),
            norm_weight("output_norm", dims.value_width),
            weight("output_proj", self.width, values, "row"),
        )

    def _gate_parameters(self) -> tuple[Parameter, ...]:
        values, rank = self.value_channels, self.dims.value_width
        name = "gate_proj" if self.dims.output_gate == "full" else "gate_up"
        bias = (Parameter(f"{name}.bias", (values,), "column"),) if self.dims.output_gate_bias else ()
        if self.dims.output_gate == "full":
            return (weight("gate_proj", values, self.width, "column"), *bias)
        return (
            weight("gate_down", rank, self.width),
            weight("gate_up", values, rank, "column"),
            *bias,
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        dims, tokens, width = self.dims, shard.tokens, self.width
        keys, values = self.key_channels / shard.tensor, self.value_channels / shard.tensor
        decays, heads = self.decay_channels / shard.tensor, self.value_heads / shard.tensor
        convolved = tokens * (2 * keys + values) * shard.element_bytes
        output = tokens * values * shard.element_bytes
        return (
            gemm("q_proj", tokens, width, keys),
            gemm("k_proj", tokens, width, keys),
            gemm("v_proj", tokens, width, values),
            Elementwise("convolutions", CONVOLUTION[0] * convolved, CONVOLUTION[1] * convolved, kernels=3),
            gemm("decay_down", tokens, width, dims.decay_rank),
            gemm("decay_up", tokens, dims.decay_rank, decays),
            gemm("beta_proj", tokens, width, heads),
            self.core.kernel(shard),
            *self._gate_kernels(shard),
            Elementwise("gated output norm", 3 * output, 5 * output),
            gemm("output_proj", tokens, values, width),
            joint_sum(READERS, tokens, width, shard),
        )

    def _gate_kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        tokens, values, rank = shard.tokens, self.value_channels / shard.tensor, self.dims.value_width
        if self.dims.output_gate == "full":
            return (gemm("gate_proj", tokens, self.width, values),)
        return (gemm("gate_down", tokens, self.width, rank), gemm("gate_up", tokens, rank, values))

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        match recompute:
            case "none":
                return self._saved_for_gradients(shard)
            case "selective":
                return self._saved_products(shard)
            case "full":
                return ()

    def _saved_products(self, shard: Shard) -> tuple[Saved, ...]:
        element = shard.tokens * shard.element_bytes
        channels = (2 * self.key_channels + self.value_channels) / shard.tensor
        return (
            Saved("q, k, v projections", element * channels),
            *self._low_rank(shard),
            Saved("decay logits", element * self.decay_channels / shard.tensor),
            Saved("beta logits", element * self.value_heads / shard.tensor),
            *self.core.products(shard),
            Saved("gate logits", element * self.value_channels / shard.tensor),
            Saved("output", element * self.width),
        )

    def _low_rank(self, shard: Shard) -> tuple[Saved, ...]:
        ranks = self.dims.decay_rank + (self.dims.value_width if self.dims.output_gate == "low_rank" else 0)
        return (Saved("low-rank projections", shard.tokens * ranks * shard.element_bytes),)

    def _saved_for_gradients(self, shard: Shard) -> tuple[Saved, ...]:
        values = shard.tokens * self.value_channels / shard.tensor * shard.element_bytes
        heads = shard.tokens * self.value_heads / shard.tensor
        return (
            Saved("input", shard.tokens * self.width * shard.element_bytes),
            *self._saved_convolutions(shard),
            *self._low_rank(shard),
            *self.core.saved(shard),
            *norm_saved("output norm", heads, self.dims.value_width, shard),
            Saved("padding of the core's output", self.core.output_padding(shard)),
            Saved("gate logits", values),
            Saved("gated output", values),
        )

    def _saved_convolutions(self, shard: Shard) -> tuple[Saved, ...]:
        """fused: the input. plain: the extended input and the sum, in fp32."""
        channels = (2 * self.key_channels + self.value_channels) / shard.tensor
        if shard.implementation == "fused":
            return (Saved("convolution inputs", shard.tokens * channels * shard.element_bytes),)
        before = shard.sequences * (self.dims.convolution_width - 1)
        return (
            Saved("convolution inputs, extended", (shard.tokens + before) * channels * 4),
            Saved("convolution sums", shard.tokens * channels * 4),
        )

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        """What forward does, backwards: it projects first, then convolves, and sums up at the very end."""
        element, width, dims = shard.tokens * shard.element_bytes, self.width, self.dims
        values, keys = self.value_channels / shard.tensor, self.key_channels / shard.tensor
        decays, heads = self.decay_channels / shard.tensor, self.value_heads / shard.tensor
        value, outer, rank = element * values, element * width, dims.decay_rank
        norm = norm_backward("output norm", shard.tokens * heads, dims.value_width, shard)
        gates = value + self.core.output_padding(shard)  # their logits
        up, down = self._gate_backward(shard)
        return (
            *into_sequence_parallel(width, shard),
            Step("output_proj", value, value, values * width),  # frees what it read
            Step("output norm", 2 * value, norm.frees + gates, norm.weights),
            *up,
            self.core.backward(shard),
            product_backward("decay_up", shard.tokens, rank, decays, shard, element * rank),
            *(self._convolution_backward(name, channels, shard) for name, channels in self._convolved(shard)),
            down,
            product_backward("beta_proj", shard.tokens, width, heads, shard, 0),
            product_backward("decay_down", shard.tokens, width, rank, shard, 0),
            product_backward("v_proj", shard.tokens, width, values, shard, 0),
            product_backward("k_proj", shard.tokens, width, keys, shard, 0),
            product_backward("q_proj", shard.tokens, width, keys, shard, outer),  # the input
            Step("sum of input gradients", outer, READERS * outer),
            *out_of_sequence_parallel(width, shard),
        )

    def _gate_backward(self, shard: Shard) -> tuple[tuple[Step, ...], Step]:
        """What lies between the norm and the gate's projection of the input, and that projection."""
        values, rank = self.value_channels / shard.tensor, self.dims.value_width
        if self.dims.output_gate == "full":
            return (), product_backward("gate_proj", shard.tokens, self.width, values, shard, 0)
        kept = shard.tokens * rank * shard.element_bytes
        up = product_backward("gate_up", shard.tokens, rank, values, shard, kept)
        return (up,), product_backward("gate_down", shard.tokens, self.width, rank, shard, 0)

    def _convolved(self, shard: Shard) -> tuple[tuple[str, Number], ...]:
        keys, values = self.key_channels / shard.tensor, self.value_channels / shard.tensor
        return (("v_conv", values), ("k_conv", keys), ("q_conv", keys))

    def _convolution_backward(self, name: str, channels: Number, shard: Shard) -> Step:
        """The input's gradient, and the weight's of every 64 tokens in fp32."""
        size, taps = shard.tokens * channels * shard.element_bytes, self.dims.convolution_width
        parts = shard.tokens / CONVOLUTION_BLOCK * channels * taps * 4
        all_channels = (2 * self.key_channels + self.value_channels) / shard.tensor
        kept = total(tensor.bytes for tensor in self._saved_convolutions(shard)) * channels / all_channels
        return Step(name, size + parts, size + parts + kept, weights=channels * taps)

    def scratch_bytes(self, shard: Shard) -> Number:
        return self.core.scratch_bytes(shard)

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        return (*sequence_parallel("delta attention", self.width, shard), *self._context_transfers(shard))

    def _context_transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        """The last `convolution_width` - 1 tokens of each convolution's input are gathered. Then each rank's
        segment is an affine map of the state: one gather of transition and state (Kimi K3, 5.1.2); or slices
        of all heads are exchanged for whole rows of some, and the output back."""
        ranks = shard.sequences * shard.context_parallel
        tail = ranks * (self.dims.convolution_width - 1) * shard.element_bytes / shard.tensor
        keys, values = tail * self.key_channels, tail * self.value_channels
        maps, states = self._state_bytes(shard), 1 - shard.delta_heads
        inputs, outputs = self._exchanged_bytes(shard)
        heads = shard.delta_heads
        return (
            Transfer("ends of q and k inputs", "cp", "all_gather", keys, "forward", calls=2),
            Transfer("ends of v inputs", "cp", "all_gather", values, "forward"),
            Transfer("delta state", "cp", "all_gather", maps, "forward", calls=states),
            Transfer("delta inputs for heads", "cp", "all_to_all", inputs, "forward", calls=heads),
            Transfer("delta outputs for slices", "cp", "all_to_all", outputs, "forward", calls=heads),
            Transfer(
                "gradients of ends of q and k inputs", "cp", "reduce_scatter", keys, "backward", calls=2
            ),
            Transfer("gradients of ends of v inputs", "cp", "reduce_scatter", values, "backward"),
            Transfer("delta state gradient", "cp", "reduce_scatter", maps, "backward", calls=states),
            Transfer("gradients of delta outputs", "cp", "all_to_all", outputs, "backward", calls=heads),
            Transfer("gradients of delta inputs", "cp", "all_to_all", inputs, "backward", calls=heads),
        )

    def _state_bytes(self, shard: Shard) -> Number:
        """Transitions and states of all slices."""
        dims, heads = self.dims, self.value_heads / shard.tensor
        maps = heads * dims.key_width * (dims.key_width + dims.value_width) * STATE_BYTES
        return shard.sequences * shard.context_parallel * maps

    def _exchanged_bytes(self, shard: Shard) -> tuple[Number, Number]:
        """What a rank holds of q, k, v, decay and beta logits, packed, and of the output."""
        channels = 2 * self.key_channels + self.value_channels + self.decay_channels + self.value_heads
        size = shard.tokens * shard.element_bytes / shard.tensor
        return size * channels, size * self.value_channels

    def sends_less_by_heads(self, shard: Shard) -> Number:
        """Whether exchanging heads sends fewer bytes than passing states."""
        return sum(self._exchanged_bytes(shard)) < self._state_bytes(shard)

    def limits(self) -> tuple[Limit, ...]:
        return (Limit("tp", "delta-attention heads", self.dims.heads),)

    def decode_state(self) -> DecodeState:
        state = self.value_heads * self.dims.key_width * self.dims.value_width * STATE_BYTES
        tail = (self.dims.convolution_width - 1) * (2 * self.key_channels + self.value_channels) * 2
        return DecodeState(bytes_per_token=0, constant_bytes=state + tail)
