"""Grouped-query attention (arXiv 2305.13245)."""

from __future__ import annotations

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step
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
from shipway.compiler.operators.linear import (
    balanced_attention,
    gemm,
    gradient_sum,
    into_sequence_parallel,
    norm_weight,
    out_of_sequence_parallel,
    product_backward,
    sequence_parallel,
    weight,
)
from shipway.compiler.operators.norm import norm_backward, norm_kernel, norm_saved
from shipway.compiler.operators.output_gate import (
    gate_kernels,
    gate_parameters,
    gate_saved,
    gate_width,
    output_backward,
)
from shipway.compiler.operators.rotary import rotary_saved
from shipway.compiler.operators.softmax_core import SoftmaxCore
from shipway.schemas.layout import Recompute
from shipway.schemas.model import GroupedAttention as GroupedAttentionSchema


@frozen
class GroupedAttention(Operator):
    """One layer's grouped-query attention; context parallel gathers keys and values."""

    width: int
    dims: GroupedAttentionSchema
    block: str = "grouped attention"

    @property
    def query_channels(self) -> int:
        return self.dims.heads * self.dims.head_width

    @property
    def kv_channels(self) -> int:
        return self.dims.kv_heads * self.dims.head_width

    @property
    def gate_width(self) -> int:
        return gate_width(self.dims.output_gate, self.dims.heads, self.dims.head_width)

    @property
    def core(self) -> SoftmaxCore:
        """The attention itself."""
        dims = self.dims
        return SoftmaxCore(dims.heads, dims.kv_heads, dims.head_width, dims.head_width)

    def parameters(self) -> tuple[Parameter, ...]:
        dims = self.dims
        projections = (
            ("q_proj", self.query_channels, dims.heads),
            ("k_proj", self.kv_channels, dims.kv_heads),
            ("v_proj", self.kv_channels, dims.kv_heads),
        )
        weights = tuple(weight(n, rows, self.width, "column", heads=h) for n, rows, h in projections)
        biases = tuple(Parameter(f"{n}.bias", (rows,), "column") for n, rows, _ in projections)
        norms = (norm_weight("q_norm", dims.head_width), norm_weight("k_norm", dims.head_width))
        return (
            *weights,
            *(biases if dims.bias else ()),
            *(norms if dims.query_key_norm else ()),
            *gate_parameters(dims.output_gate, self.gate_width, self.width),
            weight("output_proj", self.width, self.query_channels, "row"),
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        dims, tokens = self.dims, shard.tokens
        queries, kv = self.query_channels / shard.tensor, self.kv_channels / shard.tensor
        return (
            gemm("q_proj", tokens, self.width, queries),
            gemm("k_proj", tokens, self.width, kv),
            gemm("v_proj", tokens, self.width, kv),
            *self._position_kernels(shard),
            self.core.kernel(shard),
            *gate_kernels(dims.output_gate, self.width, self.core, shard),
            gemm("output_proj", tokens, queries, self.width),
            gradient_sum(3 if dims.output_gate == "none" else 4, tokens, self.width, shard),
        )

    def _position_kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        channels = (self.query_channels + self.kv_channels) / shard.tensor
        norm = norm_kernel("query-key norm", shard.tokens, channels, shard)
        size = 2 * shard.tokens * channels * shard.element_bytes
        rotary = Elementwise("rotary", size, size, kernels=2)
        return (
            *((norm,) if self.dims.query_key_norm else ()),
            *((rotary,) if self.dims.position.kind == "rotary" else ()),
        )

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
        return (
            Saved(
                "q, k, v projections", element * (self.query_channels + 2 * self.kv_channels) / shard.tensor
            ),
            *self.core.products(shard),
            Saved("gate logits", element * self.gate_width / shard.tensor),
            Saved("output", element * self.width),
        )

    def _saved_for_gradients(self, shard: Shard) -> tuple[Saved, ...]:
        dims = self.dims
        keys = shard.sequences * shard.context * 2 * self.kv_channels / shard.tensor * shard.element_bytes
        heads = shard.tokens * (dims.heads + dims.kv_heads) / shard.tensor
        norm = norm_saved("query-key norm", heads, dims.head_width, shard)
        rotary = (rotary_saved(2 * shard.tokens, dims.head_width),)
        return (
            Saved("input", shard.tokens * self.width * shard.element_bytes),
            *(norm if dims.query_key_norm else ()),
            *(rotary if dims.position.kind == "rotary" else ()),
            *self.core.query_and_output(shard),
            Saved("key and value", keys),
            *gate_saved(dims.output_gate, self.core, shard),
        )

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        dims, tokens, element = self.dims, shard.tokens, shard.tokens * shard.element_bytes
        queries, kv = self.query_channels / shard.tensor, self.kv_channels / shard.tensor
        keys = shard.sequences * shard.context * 2 * kv * shard.element_bytes
        outer = element * self.width
        first = 0 if dims.output_gate == "none" else outer
        core = self.core.backward(shard)
        gathered = keys - 2 * element * kv  # of other ranks' tokens under context parallel
        return (
            *into_sequence_parallel(self.width, shard),
            *output_backward(dims.output_gate, self.width, self.core, shard),
            Step("attention", core.makes, core.frees + keys + gathered),
            *self._positions_backward("key", kv, shard),
            *self._positions_backward("query", queries, shard),
            product_backward("v_proj", tokens, self.width, kv, shard, first),
            product_backward("k_proj", tokens, self.width, kv, shard, outer),
            product_backward("q_proj", tokens, self.width, queries, shard, 2 * outer),  # and the input
            *out_of_sequence_parallel(self.width, shard),
        )

    def _positions_backward(self, name: str, channels: Number, shard: Shard) -> tuple[Step, ...]:
        dims = self.dims
        size, heads = shard.tokens * channels * shard.element_bytes, shard.tokens * channels / dims.head_width
        angles = rotary_saved(shard.tokens, dims.head_width).bytes
        return (
            *((Step(f"rotary {name}", size, size + angles),) if dims.position.kind == "rotary" else ()),
            *((norm_backward(f"{name} norm", heads, dims.head_width, shard),) if dims.query_key_norm else ()),
        )

    def scratch_bytes(self, shard: Shard) -> Number:
        return self.core.scratch_bytes(shard)

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        elements = shard.sequences * shard.context * 2 * self.kv_channels / shard.tensor
        size = elements * shard.element_bytes
        channels = self.dims.heads * self.dims.head_width / shard.tensor
        return (
            *sequence_parallel("grouped attention", self.width, shard),
            Transfer("keys and values", "cp", "all_gather", size, "forward"),
            Transfer("key and value gradients", "cp", "reduce_scatter", size, "backward"),
            *balanced_attention(shard, channels, channels),
        )

    def limits(self) -> tuple[Limit, ...]:
        return (
            Limit("tp", "attention heads", self.dims.heads),
            Limit("tp", "key-value heads", self.dims.kv_heads),
        )

    def decode_state(self) -> DecodeState:
        return DecodeState(bytes_per_token=2 * 2 * self.kv_channels, constant_bytes=0)
