"""Gated multi-head latent attention (arXiv 2405.04434, section 2.1; gate: arXiv 2505.06708)."""

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
from shipway.compiler.operators.linear import gemm, norm_weight, sequence_parallel, weight
from shipway.compiler.operators.norm import norm_kernel, norm_saved
from shipway.schemas.layout import Recompute
from shipway.schemas.model import LatentAttention as LatentAttentionSchema


@dataclass(frozen=True)
class LatentAttention(Operator):
    """One layer's latent attention; tensor parallel cuts heads, context parallel gathers latents."""

    width: int
    dims: LatentAttentionSchema
    block: str = "latent attention"

    @property
    def key_width(self) -> int:
        return self.dims.nope_width + self.dims.rope_width

    @property
    def latent_width(self) -> int:
        """Width of what is cached for one token."""
        return self.dims.kv_rank + self.dims.rope_width

    @property
    def gate_width(self) -> int:
        match self.dims.output_gate:
            case "none":
                return 0
            case "per_head":
                return self.dims.heads
            case "elementwise":
                return self.dims.heads * self.dims.value_width

    def parameters(self) -> tuple[Parameter, ...]:
        dims, heads = self.dims, self.dims.heads
        up = heads * (dims.nope_width + dims.value_width)
        return (
            *self._query_parameters(),
            weight("kv_down", self.latent_width, self.width),
            norm_weight("kv_norm", dims.kv_rank),
            weight("kv_up", up, dims.kv_rank, "column", heads=heads),
            *gate_parameters(dims.output_gate, self.gate_width, self.width),
            weight("output_proj", self.width, heads * dims.value_width, "row"),
        )

    def _query_parameters(self) -> tuple[Parameter, ...]:
        rank, heads = self.dims.query_rank, self.dims.heads
        if rank is None:
            return (weight("q_proj", heads * self.key_width, self.width, "column", heads=heads),)
        return (
            weight("q_down", rank, self.width),
            norm_weight("q_norm", rank),
            weight("q_up", heads * self.key_width, rank, "column", heads=heads),
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        dims, tokens, heads = self.dims, shard.tokens, self.dims.heads / shard.tensor
        keys = shard.sequences * shard.context
        assembled = (tokens + keys) * heads * self.key_width * shard.element_bytes
        return (
            *self._query_kernels(shard),
            gemm("kv_down", tokens, self.width, self.latent_width),
            norm_kernel("kv_norm", tokens, dims.kv_rank, shard),
            gemm("kv_up", keys, dims.kv_rank, heads * (dims.nope_width + dims.value_width)),
            Elementwise("assemble query and key", 2 * assembled, 2 * assembled, kernels=2),
            Attention(
                "attention",
                shard.sequences,
                heads,
                shard.context / shard.context_parallel,
                shard.context,
                self.key_width,
                dims.value_width,
            ),
            *gate_kernels(dims.output_gate, tokens, self.width, heads, dims.value_width, shard),
            gemm("output_proj", tokens, heads * dims.value_width, self.width),
        )

    def _query_kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        tokens, rank = shard.tokens, self.dims.query_rank
        queries = self.dims.heads * self.key_width / shard.tensor
        if rank is None:
            return (gemm("q_proj", tokens, self.width, queries),)
        return (
            gemm("q_down", tokens, self.width, rank),
            norm_kernel("q_norm", tokens, rank, shard),
            gemm("q_up", tokens, rank, queries),
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
        dims, element, heads = self.dims, shard.tokens * shard.element_bytes, self.dims.heads / shard.tensor
        keys = shard.sequences * shard.context
        values = heads * dims.value_width
        gate = 0 if dims.output_gate == "none" else self.gate_width / shard.tensor
        return (
            Saved("query latent", element * (dims.query_rank or 0)),
            Saved("query", element * heads * self.key_width),
            Saved("key-value latent", element * self.latent_width),
            Saved(
                "keys and values",
                keys * shard.element_bytes * heads * (dims.nope_width + dims.value_width),
            ),
            Saved("core output", element * values),
            Saved("log-sum-exp", shard.tokens * heads * 4),
            Saved("output gate", element * gate),
            Saved("output", element * self.width),
        )

    def _saved_for_gradients(self, shard: Shard) -> tuple[Saved, ...]:
        dims, element, heads = self.dims, shard.tokens * shard.element_bytes, self.dims.heads / shard.tensor
        keys = shard.sequences * shard.context * shard.element_bytes
        values = heads * dims.value_width
        query_latent: tuple[Saved, ...] = ()
        if dims.query_rank is not None:
            query_latent = (
                *norm_saved("query latent norm", shard.tokens, dims.query_rank, shard),
                Saved("query latent", element * dims.query_rank),
            )
        gate: tuple[Saved, ...] = ()
        if dims.output_gate != "none":
            gate = (
                Saved("output gate", element * self.gate_width / shard.tensor),
                Saved("gated output", element * values),
            )
        return (
            Saved("input", element * self.width),
            *query_latent,
            *norm_saved("key-value latent norm", shard.tokens, dims.kv_rank, shard),
            Saved("key-value latent", keys * dims.kv_rank),
            Saved("query", element * heads * self.key_width),
            Saved("key", keys * heads * self.key_width),
            Saved("value", keys * values),
            Saved("core output", element * values),
            Saved("log-sum-exp", shard.tokens * heads * 4),
            *gate,
        )

    def scratch_bytes(self, shard: Shard) -> Number:
        """Gradients of query, keys and values while the core's backward runs."""
        heads = self.dims.heads / shard.tensor
        keys = shard.sequences * shard.context
        gradients = shard.tokens * self.key_width + keys * (self.key_width + self.dims.value_width)
        return gradients * heads * shard.element_bytes

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        latents = shard.sequences * shard.context * self.latent_width * shard.element_bytes
        return (
            *sequence_parallel("latent attention", self.width, shard),
            Transfer("key-value latents", "cp", "all_gather", latents, "forward"),
            Transfer("key-value latent gradients", "cp", "reduce_scatter", latents, "backward"),
        )

    def limits(self) -> tuple[Limit, ...]:
        return (Limit("tp", "latent-attention heads", self.dims.heads),)

    def decode_state(self) -> DecodeState:
        return DecodeState(bytes_per_token=2 * self.latent_width, constant_bytes=0)


def gate_parameters(gate: str, gate_width: int, width: int) -> tuple[Parameter, ...]:
    """Projection of the sigmoid gate on an attention's output; per-head rows are vectors, for AdamW."""
    if gate == "none":
        return ()
    if gate == "per_head":
        return (weight("gate_proj", gate_width, width, "column", optimizer="adamw"),)
    return (weight("gate_proj", gate_width, width, "column"),)


def gate_kernels(
    gate: str, tokens: Number, width: int, heads: Number, value_width: int, shard: Shard
) -> tuple[Kernel, ...]:
    """Gate projection and the product with the core's output."""
    if gate == "none":
        return ()
    size = tokens * heads * value_width * shard.element_bytes
    columns = heads * value_width if gate == "elementwise" else heads
    return (gemm("gate_proj", tokens, width, columns), Elementwise("output gate", 3 * size, 5 * size))
