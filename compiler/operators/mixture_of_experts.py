"""Routed experts, in the latent space of Stable LatentMoE or at the model's width.

LatentMoE: arXiv 2601.18089; Kimi K3, Eq. 11. A mixture of experts is four operators: router,
routed experts, latent projections and shared experts.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Literal

import numpy as np

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step, total
from shipway.compiler.operators.base import (
    Elementwise,
    Gemm,
    Kernel,
    Limit,
    Number,
    Operator,
    Parameter,
    Saved,
    Shard,
    Transfer,
)
from shipway.compiler.operators.fp8 import kernels_of
from shipway.compiler.operators.gated_unit import GatedUnit, activation_kernel
from shipway.compiler.operators.linear import gemm, gradient_sum, norm_weight, sequence_parallel, weight
from shipway.compiler.operators.norm import norm_backward, norm_kernel, norm_saved
from shipway.compiler.operators.router import INDEX_BYTES, SCORE_BYTES, Router
from shipway.schemas.layout import Recompute
from shipway.schemas.model import Experts as ExpertsSchema

COUNT_BYTES = 4
"""Counts of rows travel as int32."""


@frozen
class RoutedExperts(Operator):
    """Dispatch, grouped products and combine; expert parallel cuts the experts, nothing cuts one expert.

    Each rank of the expert group brings its own tokens, so expert parallel divides no activation:
    a rank works on tokens x k rows, times the load imbalance.
    """

    width: int
    """Width that the experts work in: L, or D."""
    dims: ExpertsSchema
    shared: GatedUnit | None = None
    """Shared experts, which run while tokens travel."""
    block: str = "routed experts"

    def rows(self, shard: Shard) -> Number:
        """Token-expert pairs that the busiest rank of the expert group computes."""
        return shard.local_tokens * self.dims.active * shard.imbalance

    def parameters(self) -> tuple[Parameter, ...]:
        experts, inner = self.dims.routed, self.dims.inner_width
        active = Fraction(self.dims.active, experts)
        shapes = (("gate", inner, self.width), ("up", inner, self.width), ("down", self.width, inner))
        return tuple(
            Parameter(name, (experts, rows, columns), "expert", "muon", active_fraction=active)
            for name, rows, columns in shapes
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        groups = self.dims.routed / shard.expert
        rows, inner = self.rows(shard), self.dims.inner_width
        moved = rows * self.width * shard.element_bytes
        return (
            # Backward sums a token's rows as it reads them.
            Elementwise("permute", 2 * moved, 1.25 * moved, kernels=4),
            Gemm("experts gate", rows / groups, self.width, inner, groups, grouped=True),
            Gemm("experts up", rows / groups, self.width, inner, groups, grouped=True),
            activation_kernel(rows, inner, shard),
            Gemm("experts down", rows / groups, inner, self.width, groups, grouped=True),
            Elementwise("combine", 2 * moved, 3 * moved, kernels=3),
            gradient_sum(2, rows, self.width, shard),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        """What a rank receives is kept for the products, what comes back to it for the weighted sum."""
        row = self.rows(shard) * shard.element_bytes
        pairs = shard.local_tokens * self.dims.active
        halves = Saved("experts' gate and up", 2 * row * self.dims.inner_width)
        match recompute:
            case "none":
                return (
                    Saved("tokens of rows, rows of choices", 2 * pairs * INDEX_BYTES),
                    Saved("dispatched rows", row * self.width),
                    halves,
                    Saved("experts' activation", row * self.dims.inner_width),
                    Saved("experts' output", pairs * self.width * shard.element_bytes),
                )
            case "selective":
                return (halves, Saved("experts' output", row * self.width))
            case "full":
                return ()

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        """The weighted sum's, the grouped products' and the dispatch's; rows travel where ep > 1."""
        element, inner = shard.element_bytes, self.dims.inner_width
        pairs, rows = shard.local_tokens * self.dims.active, self.rows(shard)
        sent, received, narrow = (
            pairs * self.width * element,
            rows * self.width * element,
            rows * inner * element,
        )
        travels = np.asarray(shard.expert) > 1
        away, here = np.where(travels, received, 0), np.where(travels, sent, 0)
        latent = shard.local_tokens * self.width * element
        behind_latent = self.dims.latent_width is not None
        adds = not behind_latent and self.shared is not None
        weights = pairs * SCORE_BYTES
        matrix = self.dims.routed / shard.expert * inner * self.width
        return (
            # The rows' gradients, their weights in the experts' order and their products with the rows.
            Step("weighted sum", sent + 3 * weights, sent + 2 * weights + (latent if behind_latent else 0)),
            Step("rows to their experts", away, here),
            Step("down", narrow, narrow + received, matrix),
            Step("activation", 2 * narrow, 3 * narrow),
            Step("up", received, narrow, matrix),
            Step("gate", received, narrow + 2 * received, matrix),  # added to that of `up`
            Step("rows back", here, away),
            # A token's rows are summed; without a latent width that is added to the shared experts' gradient.
            Step("dispatch", latent, sent + 2 * pairs * INDEX_BYTES + (latent if adds else 0)),
        )

    @property
    def reduced_apart(self) -> bool:
        return True

    def scratch_bytes(self, shard: Shard) -> Number:
        """Gradients of both halves and of the rows while the grouped products' backward runs, and the
        rows that the all-to-all sends."""
        received = self.rows(shard) * (2 * self.dims.inner_width + 2 * self.width)
        sent = shard.local_tokens * self.dims.active * self.width
        return (received + sent) * shard.element_bytes

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        """Each rank tells the others how many rows it has for each expert, before it sends them; shared
        experts run while these travel, and their gradients are computed while gradients travel back."""
        size = shard.local_tokens * self.dims.active * self.width * shard.element_bytes
        under = () if self.shared is None else kernels_of(self.shared, shard)
        return (
            Transfer("rows of each expert", "ep", "all_to_all", self.dims.routed * COUNT_BYTES, "forward"),
            Transfer("dispatch", "ep", "all_to_all", size, "forward", under=under),
            Transfer("combine", "ep", "all_to_all", size, "forward"),
            Transfer("combine gradient", "ep", "all_to_all", size, "backward"),
            Transfer("dispatch gradient", "ep", "all_to_all", size, "backward", under=under),
        )

    def limits(self) -> tuple[Limit, ...]:
        return (Limit("ep", "routed experts", self.dims.routed),)


@frozen
class LatentProjections(Operator):
    """Down to the experts' latent width before dispatch, norm and up again after combine."""

    width: int
    latent_width: int
    norm: bool
    router_reads: Literal["hidden", "latent"] = "hidden"
    """The router keeps what it reads: by default the very tensor that is read here too."""
    block: str = "latent projections"

    def parameters(self) -> tuple[Parameter, ...]:
        norm = (norm_weight("latent_norm", self.latent_width),) if self.norm else ()
        return (
            weight("latent_down", self.latent_width, self.width),
            *norm,
            weight("latent_up", self.width, self.latent_width),
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        tokens, latent = shard.local_tokens, self.latent_width
        return (
            gemm("latent_down", tokens, self.width, latent),
            *((norm_kernel("latent_norm", tokens, latent, shard),) if self.norm else ()),
            gemm("latent_up", tokens, latent, self.width),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        size = shard.local_tokens * self.latent_width * shard.element_bytes
        match recompute:
            case "none":
                normed = norm_saved("latent norm", shard.local_tokens, self.latent_width, shard)
                read = Saved("input", shard.local_tokens * self.width * shard.element_bytes)
                return (
                    *(() if self.router_reads == "hidden" else (read,)),
                    *(normed if self.norm else ()),
                    Saved("combined", size),
                )
            case "selective":
                output = Saved("output", shard.local_tokens * self.width * shard.element_bytes)
                return (Saved("latent", size), output)
            case "full":
                return ()

    def backward_of_second_half(self, shard: Shard) -> tuple[Step, ...]:
        """Up, whose output's gradient is the residual path's, and the norm."""
        tokens, latent = shard.local_tokens, self.latent_width
        size = tokens * latent * shard.element_bytes
        norm = (norm_backward("latent norm", tokens, latent, shard),) if self.norm else ()
        return (Step("latent_up", size, size, self.width * latent), *norm)  # frees what it read

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        """Down, added to the other gradients of the input, which is gone then."""
        tokens = shard.local_tokens
        size, latent = (
            tokens * self.width * shard.element_bytes,
            tokens * self.latent_width * shard.element_bytes,
        )
        return (Step("latent_down", size, 2 * size + latent, self.width * self.latent_width),)

    def beside_end(self, shard: Shard) -> Number:
        """What the experts read, which the mixture holds as long as it runs."""
        return shard.local_tokens * self.latent_width * shard.element_bytes

    def not_read_again(self, shard: Shard) -> Number:
        return shard.local_tokens * self.width * shard.element_bytes

    def scratch_bytes(self, shard: Shard) -> Number:
        return shard.local_tokens * self.latent_width * shard.element_bytes


@frozen
class SharedExperts(Operator):
    """Experts that every token passes, fused into one gated unit at the full width."""

    unit: GatedUnit
    gated: bool
    block: str = "shared experts"

    def parameters(self) -> tuple[Parameter, ...]:
        unit = tuple(replace(p, name=f"shared.{p.name}") for p in self.unit.parameters())
        gate = (weight("shared_gate", 1, self.unit.width, optimizer="adamw"),) if self.gated else ()
        return (*unit, *gate)

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        size = shard.local_tokens * self.unit.width * shard.element_bytes
        gate = (
            gemm("shared_gate", shard.local_tokens, self.unit.width, 1),
            Elementwise("shared gate", 2 * size, 3 * size),
        )
        return (
            *self.unit.kernels(shard),
            *(gate if self.gated else ()),
            Elementwise("add shared", 3 * size, size),
            gradient_sum(2, shard.local_tokens, self.unit.width, shard),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        kept = self.unit.saved(shard, recompute)
        tokens = shard.local_tokens
        if recompute == "selective" and self.gated:
            return (*kept, Saved("gate logits", tokens * shard.element_bytes))
        if recompute != "none":
            return kept
        own = tuple(tensor for tensor in kept if tensor.name != "input")
        if self.gated:
            own = (
                *own,
                Saved("gate and ungated output", tokens * (self.unit.width + 1) * shard.element_bytes),
            )
        return (*self._saved_input(shard), *own)

    def _saved_input(self, shard: Shard) -> tuple[Saved, ...]:
        """Tensor parallel gathers an input of its own; otherwise router or projection keep it already."""
        size = shard.tokens * self.unit.width * shard.element_bytes
        return (Saved("input", np.where(shard.tensor > 1, size, 0)),)

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        size = shard.local_tokens * self.unit.width * shard.element_bytes
        own = total(tensor.bytes for tensor in self._saved_input(shard))
        unit = self.unit.backward_freeing(shard, own)
        if not self.gated:
            return unit
        logits = shard.local_tokens * shard.element_bytes
        # The product with the gate: of the output, and of the gate before it is summed over channels.
        gate = (
            Step("shared gate", 2 * size, size),
            Step("shared_gate", size, size + 2 * logits, self.unit.width),
        )
        return (*gate, *unit, Step("gated output's gradient", 0, size))

    def beside_end(self, shard: Shard) -> Number:
        """What the routed experts gave; under expert parallel these run before."""
        size = shard.local_tokens * self.unit.width * shard.element_bytes
        return np.where(np.asarray(shard.expert) > 1, 0, size)

    def not_read_again(self, shard: Shard) -> Number:
        return 0 if self.gated else self.unit.not_read_again(shard)

    def scratch_bytes(self, shard: Shard) -> Number:
        return self.unit.scratch_bytes(shard)

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        # Under expert parallel they run before the routed ones are done; a gate keeps their output.
        again = 1 if self.gated else np.where(np.asarray(shard.expert) > 1, 1, 0)
        return sequence_parallel("shared experts", self.unit.width, shard, again=again)

    def limits(self) -> tuple[Limit, ...]:
        return (Limit("tp", "shared experts' inner width", self.unit.inner_width),)


def mixture_of_experts(width: int, dims: ExpertsSchema) -> tuple[tuple[str, Operator], ...]:
    """The operators of one mixture of experts, each with its path inside the module."""
    expert_width = dims.latent_width or width
    router_width = expert_width if dims.router_input == "latent" else width
    operators: list[tuple[str, Operator]] = [("router", Router(router_width, dims))]
    if dims.latent_width is not None:
        operators.append(
            ("", LatentProjections(width, dims.latent_width, dims.latent_norm, dims.router_input))
        )
    shared = None
    if dims.shared:
        shared = GatedUnit(width, dims.shared * (dims.shared_inner_width or dims.inner_width))
    operators.append(("experts", RoutedExperts(expert_width, dims, shared)))
    if shared is not None:
        operators.append(("", SharedExperts(shared, dims.shared_gate)))
    return tuple(operators)
