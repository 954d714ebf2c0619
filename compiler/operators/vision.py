"""Native-resolution vision encoder in the manner of MoonViT-V2, with its projector."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.base import (
    Attention,
    Elementwise,
    Gemm,
    Kernel,
    Number,
    Operator,
    Parameter,
    Saved,
    Shard,
    Transfer,
)
from shipway.compiler.operators.linear import gemm
from shipway.compiler.operators.norm import norm_kernel, norm_saved
from shipway.compiler.operators.rotary import rotary_saved
from shipway.schemas.layout import Recompute
from shipway.schemas.model import Vision as VisionSchema

CHANNELS = 3
"""Colours of a pixel."""
INDEX_BYTES = 8
"""Indices are int64."""
PIXEL_BYTES = 4
"""Pictures come in fp32."""


def _vision_weight(name: str, *shape: int) -> Parameter:
    """A matrix that no text token passes; every rank of tensor parallel holds it whole."""
    return Parameter(name, shape, optimizer="muon", active_fraction=Fraction(0))


def _vision_vector(name: str, *shape: int) -> Parameter:
    return Parameter(name, shape, active_fraction=Fraction(0))


@frozen
class VisionTower(Operator):
    """Patch projection, learned position grid, encoder layers and final norm, over packed patches."""

    dims: VisionSchema
    patches_per_token: int = 0
    """Patches for each token of the micro-batch, where rows may be full of pictures (compiler.pictures)."""
    patches_per_image: int = 0
    """Patches of a picture in such rows."""
    block: str = "vision tower"

    @property
    def channels(self) -> int:
        """Inner width of the attention."""
        return self.dims.heads * self.dims.head_width

    @property
    def pixels(self) -> int:
        """Values in one patch."""
        return CHANNELS * self.dims.patch**2

    def parameters(self) -> tuple[Parameter, ...]:
        dims = self.dims
        layers = tuple(
            parameter
            for layer in range(dims.layers)
            for parameter in self._layer_parameters(f"layers.{layer}")
        )
        return (
            _vision_vector("patch.weight", dims.width, self.pixels),
            _vision_vector("position", dims.position_grid**2, dims.width),
            *layers,
            _vision_vector("norm.weight", dims.width),
        )

    def _layer_parameters(self, layer: str) -> tuple[Parameter, ...]:
        width, channels, inner = self.dims.width, self.channels, self.dims.inner_width
        return (
            _vision_vector(f"{layer}.attention_norm.weight", width),
            _vision_weight(f"{layer}.q_proj.weight", channels, width),
            _vision_weight(f"{layer}.k_proj.weight", channels, width),
            _vision_weight(f"{layer}.v_proj.weight", channels, width),
            _vision_weight(f"{layer}.output_proj.weight", width, channels),
            _vision_vector(f"{layer}.feed_forward_norm.weight", width),
            _vision_weight(f"{layer}.up.weight", inner, width),
            _vision_weight(f"{layer}.down.weight", width, inner),
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        dims, patches = self.dims, share_of(self, shard)
        element = patches * shard.element_bytes
        per_image = self.patches_per_image or shard.patches_per_image
        images = patches / per_image
        # All layers are alike: one kernel of each sort stands for all of them, as groups of rows.
        rows, layers = patches, dims.layers
        return (
            Gemm("patch", patches, self.pixels, dims.width, input_gradient=False),
            Elementwise("position", 3 * element * dims.width, element * dims.width),
            Gemm("q, k, v", rows, dims.width, 3 * self.channels, layers),
            Attention(
                "vision attention",
                images * layers,
                dims.heads,
                per_image,
                per_image,
                dims.head_width,
                dims.head_width,
                causal=False,
            ),
            Gemm("output_proj", rows, self.channels, dims.width, layers),
            Gemm("up", rows, dims.width, dims.inner_width, layers),
            Elementwise(
                "gelu", 2 * element * dims.inner_width * layers, 3 * element * dims.inner_width * layers
            ),
            Gemm("down", rows, dims.inner_width, dims.width, layers),
            norm_kernel("norms", patches * (2 * layers + 1), dims.width, shard),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        """plain: documents are gathered by length, so the core's output and the one in order both live."""
        dims, patches = self.dims, share_of(self, shard)
        element = patches * shard.element_bytes
        plain = shard.implementation == "plain"
        channels, inner = self.channels * element, dims.inner_width * element
        norm = sum(tensor.bytes for tensor in norm_saved("norm", patches, dims.width, shard))
        core = (5 if plain else 4) * channels + patches * dims.heads * 4
        indices = 2 * patches * INDEX_BYTES if plain else 0
        rotary = rotary_saved(2 * patches, dims.head_width).bytes
        products = 2 * element * dims.width + 2 * inner
        return (
            Saved("pixels", element * self.pixels),
            Saved("pixels of others", (patches_of(self, shard) - patches) * self.pixels * PIXEL_BYTES),
            Saved("order of patches", patches * INDEX_BYTES),
            Saved("encoder layers", (2 * norm + core + indices + rotary + products) * dims.layers),
            Saved("final norm", norm),
        )

    def scratch_bytes(self, shard: Shard) -> Number:
        return 2 * share_of(self, shard) * self.dims.inner_width * shard.element_bytes


@frozen
class Projector(Operator):
    """Pixel shuffle of merge x merge patches, then two projections to the model width."""

    dims: VisionSchema
    width: int
    patches_per_token: int = 0
    patches_per_image: int = 0
    block: str = "projector"

    @property
    def merged_width(self) -> int:
        return self.dims.width * self.dims.merge**2

    def parameters(self) -> tuple[Parameter, ...]:
        inner = self.dims.projector_width
        return (
            _vision_weight("up.weight", inner, self.merged_width),
            _vision_weight("down.weight", self.width, inner),
            _vision_vector("down.bias", self.width),
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        tokens, inner = share_of(self, shard) / self.dims.merge**2, self.dims.projector_width
        element = tokens * inner * shard.element_bytes
        return (
            gemm("up", tokens, self.merged_width, inner),
            Elementwise("gelu", 2 * element, 3 * element),
            gemm("down", tokens, inner, self.width),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        element = share_of(self, shard) / self.dims.merge**2 * shard.element_bytes
        return (
            Saved("merged patches", element * self.merged_width),
            Saved("projector inner", 2 * element * self.dims.projector_width),
        )

    def scratch_bytes(self, shard: Shard) -> Number:
        """Embeddings gathered from all ranks that share the pictures, before each takes its own."""
        ranks = shard.tensor * shard.context_parallel
        return (ranks > 1) * self._embedding_bytes(shard, ranks)

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        """Gathering over tp, then over cp, in the sizes that the largest share sets."""
        if not self.patches_per_token:
            return ()
        over_tp = self._embedding_bytes(shard, shard.tensor)
        over_cp = over_tp * shard.context_parallel
        return (
            Transfer("image embeddings", "tp", "all_gather", over_tp, "forward"),
            Transfer("image embeddings", "cp", "all_gather", over_cp, "forward"),
            Transfer("image embeddings' gradient", "cp", "reduce_scatter", over_cp, "backward"),
            Transfer("image embeddings' gradient", "tp", "reduce_scatter", over_tp, "backward"),
        )

    def _embedding_bytes(self, shard: Shard, ranks: Number) -> Number:
        """What so many ranks' largest shares come to."""
        return ranks * share_of(self, shard) / self.dims.merge**2 * self.width * shard.element_bytes


def patches_of(operator: VisionTower | Projector, shard: Shard) -> Number:
    """Patches in a micro-batch's whole rows: those given, and those that full rows would hold."""
    return shard.patches + operator.patches_per_token * shard.tokens * shard.context_parallel


def share_of(operator: VisionTower | Projector, shard: Shard) -> Number:
    """Patches that one of the tp x cp ranks encodes at most.

    Whole pictures go to whoever has least, the largest first (runtime/parallel/pictures.py): nobody has more
    than an equal part and, of the largest picture, what the others lack (Graham, 1969).
    """
    patches, ranks = patches_of(operator, shard), shard.tensor * shard.context_parallel
    largest = operator.patches_per_image or shard.patches_per_image
    return np.minimum(patches, patches / ranks + largest * (1 - 1 / ranks))
