"""Gated multi-head latent attention (arXiv 2405.04434, section 2.1; gate: arXiv 2505.06708)."""

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
from shipway.schemas.model import LatentAttention as LatentAttentionSchema


@frozen
class LatentAttention(Operator):
    """One layer's latent attention; tensor parallel cuts heads, context parallel gathers latents, or keys
    and values where positions are mixed into these."""

    width: int
    dims: LatentAttentionSchema
    given_positions: bool = False
    """Whether its module is given positions, as all attentions are where one of them rotates: then context
    parallel gathers keys and values."""
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
        return gate_width(self.dims.output_gate, self.dims.heads, self.dims.value_width)

    @property
    def core(self) -> SoftmaxCore:
        """The attention itself."""
        heads = self.dims.heads
        return SoftmaxCore(heads, heads, self.key_width, self.dims.value_width)

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

    def latents(self, shard: Shard) -> Number:
        """Tokens whose keys and values a rank makes: of whole rows where it gathers latents."""
        return shard.tokens if self.gathers_heads else shard.sequences * shard.context

    @property
    def gathers_heads(self) -> bool:
        """Whether context parallel gathers keys and values rather than the latents that they are made of."""
        return self.given_positions or self.dims.position.kind == "rotary"

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        dims, tokens, heads = self.dims, shard.tokens, self.dims.heads / shard.tensor
        keys = self.latents(shard)
        assembled = (tokens + keys) * heads * self.key_width * shard.element_bytes
        return (
            *self._query_kernels(shard),
            gemm("kv_down", tokens, self.width, self.latent_width),
            norm_kernel("kv_norm", tokens, dims.kv_rank, shard),
            gemm("kv_up", keys, dims.kv_rank, heads * (dims.nope_width + dims.value_width)),
            Elementwise("assemble query and key", 2 * assembled, 2 * assembled, kernels=2),
            self.core.kernel(shard),
            *gate_kernels(dims.output_gate, self.width, self.core, shard),
            gemm("output_proj", tokens, heads * dims.value_width, self.width),
            gradient_sum(2 if dims.output_gate == "none" else 3, tokens, self.width, shard),
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
        keys = self.latents(shard) * shard.element_bytes
        return (
            Saved("query latent", element * (dims.query_rank or 0)),
            Saved("query", element * heads * self.key_width),
            Saved("key-value latent", element * self.latent_width),
            Saved("keys and values", keys * heads * (dims.nope_width + dims.value_width)),
            *self.core.products(shard),
            Saved("gate logits", element * self.gate_width / shard.tensor),
            Saved("output", element * self.width),
        )

    def _saved_for_gradients(self, shard: Shard) -> tuple[Saved, ...]:
        dims, element = self.dims, shard.tokens * shard.element_bytes
        keys = self.latents(shard)
        query_latent: tuple[Saved, ...] = ()
        if dims.query_rank is not None:
            query_latent = (
                *norm_saved("query latent norm", shard.tokens, dims.query_rank, shard),
                Saved("query latent", element * dims.query_rank),
            )
        return (
            Saved("input", element * self.width),
            *query_latent,
            *norm_saved("key-value latent norm", shard.tokens, dims.kv_rank, shard),
            # In the same tensor as the norm's input, which keeps it alive.
            Saved("shared key", element * dims.rope_width),
            Saved("key-value latent", keys * dims.kv_rank * shard.element_bytes),
            *self._saved_rotary(shard),
            *self.core.query_and_output(shard),
            *self._saved_keys(shard),
            *gate_saved(dims.output_gate, self.core, shard),
        )

    def _saved_rotary(self, shard: Shard) -> tuple[Saved, ...]:
        if self.dims.position.kind != "rotary":
            return ()
        return (rotary_saved(2 * shard.tokens, self.dims.rope_width),)

    def _saved_keys(self, shard: Shard) -> tuple[Saved, ...]:
        """Keys are joined from both parts; values stay a view of `kv_up`'s output, which lives as long."""
        dims = self.dims
        row = shard.sequences * shard.context * dims.heads / shard.tensor * shard.element_bytes
        padded = self.core.padded(shard)
        own_keys = dims.rope_width == 0
        return (
            *(() if own_keys else (Saved("key", row * self.key_width),)),
            *((Saved("value, padded", row * self.key_width),) if padded else ()),
            *(
                (Saved("keys and values", row * (dims.nope_width + dims.value_width)),)
                if own_keys or not padded
                else ()
            ),
        )

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        dims, element, heads = self.dims, shard.tokens * shard.element_bytes, self.dims.heads / shard.tensor
        keys, outer = self.latents(shard), element * self.width
        latent_keys = keys * shard.element_bytes
        first = 0 if dims.output_gate == "none" else outer
        core, joined = self.core.backward(shard), self._join_backward(shard)
        norm = norm_backward("key-value latent norm", shard.tokens, dims.kv_rank, shard)
        up = heads * (dims.nope_width + dims.value_width)
        return (
            *into_sequence_parallel(self.width, shard),
            *output_backward(dims.output_gate, self.width, self.core, shard),
            Step("attention", core.makes, core.frees + total(t.bytes for t in self._saved_keys(shard))),
            *joined,
            product_backward("kv_up", keys, dims.kv_rank, up, shard, latent_keys * dims.kv_rank),
            Step("latents of other ranks", 0, (latent_keys - element) * dims.kv_rank),
            Step("key-value latent norm", norm.makes, norm.frees + element * dims.rope_width, norm.weights),
            Step("latent and shared key", element * self.latent_width, element * self.latent_width),
            product_backward("kv_down", shard.tokens, self.width, self.latent_width, shard, first),
            *self._query_backward(shard),
            *out_of_sequence_parallel(self.width, shard),
        )

    def _join_backward(self, shard: Shard) -> tuple[Step, ...]:
        """From the gradients of keys and values to that of `kv_up`'s output, which holds both."""
        dims, heads = self.dims, self.dims.heads / shard.tensor
        whole = shard.sequences * shard.context * heads * shard.element_bytes
        made = self.latents(shard) * heads * shard.element_bytes
        shared = shard.tokens * dims.rope_width * shard.element_bytes
        turned = self._saved_rotary(shard)
        rotated = shard.tokens * heads * dims.rope_width * shard.element_bytes if turned else 0
        summed = Step("shared key", shared + rotated, rotated + total(t.bytes for t in turned))
        size = made * (dims.nope_width + dims.value_width)
        given = whole * (self.key_width + dims.value_width)
        return (*((summed,) if dims.rope_width else ()), Step("keys and values", size, given))

    def _query_backward(self, shard: Shard) -> tuple[Step, ...]:
        tokens, rank, element = shard.tokens, self.dims.query_rank, shard.tokens * shard.element_bytes
        queries, outer = self.dims.heads * self.key_width / shard.tensor, element * self.width
        if rank is None:
            return (product_backward("q_proj", tokens, self.width, queries, shard, 2 * outer),)
        return (
            product_backward("q_up", tokens, rank, queries, shard, element * rank),
            norm_backward("query latent norm", tokens, rank, shard),
            product_backward("q_down", tokens, self.width, rank, shard, 2 * outer),  # and the input
        )

    def scratch_bytes(self, shard: Shard) -> Number:
        return self.core.scratch_bytes(shard)

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        dims, heads = self.dims, self.dims.heads / shard.tensor
        element = shard.sequences * shard.context * shard.element_bytes
        name, width = "key-value latents", self.latent_width
        if self.gathers_heads:
            name, width = "keys and values", heads * (self.key_width + dims.value_width)
        return (
            *sequence_parallel("latent attention", self.width, shard),
            Transfer(name, "cp", "all_gather", element * width, "forward"),
            Transfer(f"gradients of {name}", "cp", "reduce_scatter", element * width, "backward"),
            *balanced_attention(shard, heads * self.key_width, heads * dims.value_width),
        )

    def limits(self) -> tuple[Limit, ...]:
        return (Limit("tp", "latent-attention heads", self.dims.heads),)

    def decode_state(self) -> DecodeState:
        return DecodeState(bytes_per_token=2 * self.latent_width, constant_bytes=0)
