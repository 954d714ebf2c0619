"""Gated feed-forward unit: SwiGLU (arXiv 2002.05202) or SiTU-GLU (Kimi K3, Eq. 12)."""

from __future__ import annotations

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step
from shipway.compiler.operators.base import (
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
    gemm,
    gradient_sum,
    into_sequence_parallel,
    out_of_sequence_parallel,
    sequence_parallel,
    weight,
)
from shipway.schemas.layout import Recompute


@frozen
class GatedUnit(Operator):
    """down(activation(gate(x), up(x))); tensor parallel cuts the inner width."""

    width: int
    inner_width: int
    block: str = "dense feed-forward"

    def parameters(self) -> tuple[Parameter, ...]:
        return (
            weight("gate", self.inner_width, self.width, "column"),
            weight("up", self.inner_width, self.width, "column"),
            weight("down", self.width, self.inner_width, "row"),
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        tokens, inner = shard.tokens, self.inner_width / shard.tensor
        return (
            gemm("gate", tokens, self.width, inner),
            gemm("up", tokens, self.width, inner),
            activation_kernel(tokens, inner, shard),
            gemm("down", tokens, inner, self.width),
            gradient_sum(2, tokens, self.width, shard),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        inner = Saved("inner", shard.tokens * self.inner_width / shard.tensor * shard.element_bytes)
        halves = (Saved("gate", inner.bytes), Saved("up", inner.bytes))
        match recompute:
            case "none":
                size = shard.tokens * self.width * shard.element_bytes
                return (Saved("input", size), *halves, Saved("activation", inner.bytes))
            case "selective":
                output = Saved("output", shard.tokens * self.width * shard.element_bytes)
                return (*halves, output)
            case "full":
                return ()

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        return self.backward_freeing(shard, shard.tokens * self.width * shard.element_bytes)

    def backward_freeing(self, shard: Shard, input_bytes: Number) -> tuple[Step, ...]:
        """Its backward; `input_bytes` of the input are its own."""
        row, element = self.inner_width / shard.tensor, shard.tokens * shard.element_bytes
        inner, outer, weights = element * row, element * self.width, row * self.width
        return (
            *into_sequence_parallel(self.width, shard),
            Step("down", inner, inner, weights),  # frees the activation
            Step("activation", 2 * inner, 3 * inner),  # and both halves, and its own gradient
            Step("up", outer, inner, weights),
            Step("gate", outer, inner + outer + input_bytes, weights),  # added to that of `up`
            *out_of_sequence_parallel(self.width, shard),
        )

    def not_read_again(self, shard: Shard) -> Number:
        return shard.tokens * self.width * shard.element_bytes

    def scratch_bytes(self, shard: Shard) -> Number:
        return 2 * shard.tokens * self.inner_width / shard.tensor * shard.element_bytes

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        return sequence_parallel("feed-forward", self.width, shard, again=0)

    def limits(self) -> tuple[Limit, ...]:
        return (Limit("tp", "feed-forward inner width", self.inner_width),)


def activation_kernel(rows: Number, inner: Number, shard: Shard) -> Elementwise:
    """Forward reads both halves and writes the product; backward reads three tensors and writes two."""
    size = rows * inner * shard.element_bytes
    return Elementwise("activation", 3 * size, 5 * size)
