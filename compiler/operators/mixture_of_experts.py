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
from shipway.compiler.operators.norm import norm_kernel, norm_saved
from shipway.compiler.operators.router import INDEX_BYTES, Router
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
