"""Grouped-query attention (arXiv 2305.13245)."""

from __future__ import annotations

from dataclasses import dataclass

from shipway.compiler.operators.base import (
    Attention,
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
from shipway.compiler.operators.latent_attention import gate_kernels, gate_parameters
from shipway.compiler.operators.linear import gemm, norm_weight, sequence_parallel, weight
from shipway.compiler.operators.norm import norm_kernel, norm_saved
from shipway.schemas.layout import Recompute
from shipway.schemas.model import GroupedAttention as GroupedAttentionSchema


@dataclass(frozen=True)
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
        match self.dims.output_gate:
            case "none":
                return 0
            case "per_head":
                return self.dims.heads
            case "elementwise":
                return self.query_channels

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
        heads = dims.heads / shard.tensor
        return (
            gemm("q_proj", tokens, self.width, queries),
            gemm("k_proj", tokens, self.width, kv),
            gemm("v_proj", tokens, self.width, kv),
            *self._position_kernels(shard),
            Attention(
                "attention",
                shard.sequences,
                heads,
                shard.context / shard.context_parallel,
                shard.context,
                dims.head_width,
                dims.head_width,
            ),
            *gate_kernels(dims.output_gate, tokens, self.width, heads, dims.head_width, shard),
            gemm("output_proj", tokens, queries, self.width),
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
        dims, element = self.dims, shard.tokens * shard.element_bytes
        queries, kv = self.query_channels / shard.tensor, self.kv_channels / shard.tensor
        heads = dims.heads / shard.tensor
        if recompute == "full":
            return ()
        gathered = shard.sequences * shard.context * shard.element_bytes
        core = (
            Saved("core output", element * queries),
            Saved("log-sum-exp", shard.tokens * heads * 4),
            *((Saved("output gate", element * self.gate_width / shard.tensor),) if self.gate_width else ()),
        )
        if recompute == "selective":
            projections = Saved("q, k, v projections", element * (queries + 2 * kv))
            return (projections, *core, Saved("output", element * self.width))
        norms = norm_saved("query-key norm", shard.tokens, queries + kv, shard)[:1]
        rstd = Saved("query-key norm rstd", shard.tokens * (dims.heads + dims.kv_heads) / shard.tensor * 4)
        return (
            Saved("input", element * self.width),
            *((*norms, rstd) if dims.query_key_norm else ()),
            Saved("query", element * queries),
            Saved("key and value", gathered * 2 * kv),
            *core,
            *((Saved("gated output", element * queries),) if self.gate_width else ()),
        )

    def scratch_bytes(self, shard: Shard) -> Number:
        """Gradients of query, keys and values while the core's backward runs."""
        keys = shard.sequences * shard.context
        elements = shard.tokens * self.query_channels + keys * 2 * self.kv_channels
        return elements / shard.tensor * shard.element_bytes

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        elements = shard.sequences * shard.context * 2 * self.kv_channels / shard.tensor
        size = elements * shard.element_bytes
        return (
            *sequence_parallel("grouped attention", self.width, shard),
            Transfer("keys and values", "cp", "all_gather", size, "forward"),
            Transfer("key and value gradients", "cp", "reduce_scatter", size, "backward"),
        )

    def limits(self) -> tuple[Limit, ...]:
        return (
            Limit("tp", "attention heads", self.dims.heads),
            Limit("tp", "key-value heads", self.dims.kv_heads),
        )

    def decode_state(self) -> DecodeState:
        return DecodeState(bytes_per_token=2 * 2 * self.kv_channels, constant_bytes=0)
