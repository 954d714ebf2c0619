"""What the chunkwise delta rule keeps and needs, in each of its two implementations.

fused: fla-core 0.6.0, `chunk_kda` with gate, beta and normalisation inside (fla/ops/kda/chunk.py).
plain: runtime/kernels/delta.py. Letters: K key width, V value width, C chunk; a chunk has C/tile tiles.
"""

from __future__ import annotations

import numpy as np

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step, total
from shipway.compiler.operators.base import DeltaRule, Number, Saved, Shard, keeps_delta

INTRA_COLUMNS = 32
"""Columns of K that a program of the kernel within chunks takes."""
TILE = 16
"""Tokens of the inner tile of a chunk."""
PAIRWISE_TILE = 4
"""The same where decay is unbounded, in the plain form."""
FP32 = 4


@frozen
class DeltaCore:
    """`heads` query and key heads, `value_heads` value heads, each with its own decay."""

    heads: int
    value_heads: int
    key_width: int
    value_width: int
    chunk: int
    bounded: bool

    def kernel(self, shard: Shard) -> DeltaRule:
        """The delta rule over this rank's tokens and heads."""
        return DeltaRule(
            "delta rule",
            shard.tokens,
            self.value_heads / shard.tensor,
            self.key_width,
            self.value_width,
            self.chunk,
            self.bounded,
            sequences=shard.sequences,
        )

    def saved(self, shard: Shard) -> tuple[Saved, ...]:
        """Tensors kept from forward to backward, inputs included where they are kept."""
        return self._fused(shard) if shard.implementation == "fused" else self._plain(shard)

    def _fused(self, shard: Shard) -> tuple[Saved, ...]:
        """Normalised q and k, v, the raw logits, beta in fp32, and the two matrices within chunks.

        Everything else (decays, the WY form, chunk states) is made anew in backward.
        """
        element = shard.tokens * shard.element_bytes
        heads, value_heads = self.heads / shard.tensor, self.value_heads / shard.tensor
        return (
            Saved("q and k, normalised", element * 2 * heads * self.key_width),
            Saved("q and k rstd", shard.tokens * 2 * heads * FP32),
            Saved("v", element * value_heads * self.value_width),
            Saved("decay logits", element * value_heads * self.key_width),
            Saved("beta logits", element * value_heads),
            Saved("beta", shard.tokens * value_heads * FP32),
            Saved("matrices within chunks", element * 2 * value_heads * self.chunk),
        )

    def _plain(self, shard: Shard) -> tuple[Saved, ...]:
        """The autograd graph of plain PyTorch: every factor of every product, in fp32.

        Exact for sequences of more than one chunk; a single chunk keeps a little less.
        """
        K, V, tile = self.key_width, self.value_width, plain_tile(self.bounded)
        C = plain_chunk(self.chunk, self._local_tokens(shard))
        row = shard.tokens * FP32
        heads, value_heads = self.heads / shard.tensor, self.value_heads / shard.tensor
        rows = self._padded_tokens(shard, C) * value_heads * FP32
        # Keys are decayed on across tiles: n tiles in, 1, 2, 3, ... n tiles of them are kept.
        tiles = C / tile
        widening = K + K * (tiles * (tiles + 1) / 2 - 1) / tiles
        # The last chunk's value is read by the output product alone: no state follows it.
        open_values = rows * V - shard.sequences * value_heads * C * V * FP32
        return (
            Saved("q and k", row * 2 * heads * K),
            Saved("q and k rstd", row * 2 * heads),
            Saved("decay logits and decays", row * 2 * value_heads * K),
            Saved("beta", row * value_heads + rows),
            Saved("chunked q, k and their decays", rows * 5 * K),
            Saved("decayed rows", rows * 3 * K),
            Saved("decays of tiles and chunks", rows * K * (3 if self.bounded else 2) / tile + rows * K / C),
            Saved("keys decayed across tiles", rows * widening),
            Saved("matrices within chunks", rows * 3 * C),
            Saved("WY form", rows * 2 * (K + V)),
            Saved("values", rows * V + open_values),
            Saved("chunk states", 2 * rows / C * K * V),
        )

    def products(self, shard: Shard) -> tuple[Saved, ...]:
        """What selective recomputation keeps: fla's kernel is run again, plain products are kept."""
        if not keeps_delta(shard.implementation):
            return ()
        K, V, tile = self.key_width, self.value_width, plain_tile(self.bounded)
        C = plain_chunk(self.chunk, self._local_tokens(shard))
        rows = self._padded_tokens(shard, C) * self.value_heads / shard.tensor * FP32
        return (
            Saved("products of tiles", rows * (C + tile)),
            Saved("triangular inverse", rows * (C - 2)),
            Saved("WY form", rows * (K + V)),
            Saved("chunk states", rows / C * K * V),
            Saved("values and outputs", rows * 3 * V),
        )

    def output_padding(self, shard: Shard) -> Number:
        """Bytes by which the output's own tensor is longer than the sequences: whole chunks, in fp32 only."""
        if shard.implementation == "fused" or shard.element_bytes < FP32:
            return 0
        padded = self._padded_tokens(shard, plain_chunk(self.chunk, self._local_tokens(shard)))
        return (padded - shard.tokens) * self.value_heads / shard.tensor * self.value_width * FP32

    def backward(self, shard: Shard) -> Step:
        """From the output's gradient to those of q, k, v and both logits (fla/ops/kda/chunk_bwd.py).

        w, u, decayed q and k and chunk states are made anew and stay to the end, and the gradients within
        chunks (chunk_intra.py) stand beside those that they are added to.
        """
        element, fp32 = shard.element_bytes, FP32
        K, V, C = self.key_width, self.value_width, self.chunk
        rows = shard.tokens * self.value_heads / shard.tensor
        states = 2 * element * K * V / C  # and their gradients
        anew = fp32 * K + element * (3 * K + 2 * V) + states
        across = fp32 * (3 * K + 2 * C + 1) + element * V
        # Beside these: the gradient of v before it, or those of q, k, decay and beta, in blocks of K.
        within = np.maximum(element * V, fp32 * (3 * K + 1 + np.ceil(K / INTRA_COLUMNS)))
        made = rows * (anew + across + within)
        keys = shard.tokens * 2 * self.heads / shard.tensor * K * element
        left = keys + rows * element * (V + K + 1)
        kept = total(tensor.bytes for tensor in self.saved(shard))
        return Step("delta rule", made, made - left + rows * V * element + kept)

    def scratch_bytes(self, shard: Shard) -> Number:
        """Temporaries of backward, which makes w, u, decayed q and k, and chunk states anew."""
        element = shard.tokens * shard.element_bytes
        heads = self.value_heads / shard.tensor
        keys, values = heads * self.key_width, heads * self.value_width
        states = element * keys * self.value_width / self.chunk
        recomputed = element * (3 * keys + 2 * values) + shard.tokens * FP32 * keys + states
        gradients = shard.tokens * FP32 * (3 * keys + 2 * heads * self.chunk) + element * 2 * values + states
        return recomputed + gradients

    def _local_tokens(self, shard: Shard) -> Number:
        return shard.context / shard.context_parallel

    def _padded_tokens(self, shard: Shard, chunk: Number) -> Number:
        return shard.sequences * -(-self._local_tokens(shard) // chunk) * chunk


def plain_tile(bounded: bool) -> int:
    """Tokens of the plain form's inner tile; pairs of an unbounded decay are taken one by one."""
    return TILE if bounded else PAIRWISE_TILE


def plain_chunk(chunk: int, tokens: Number) -> Number:
    """The chunk that the plain form uses on sequences of `tokens`: a power of two, no more than needed."""
    return np.minimum(chunk, 2 ** np.ceil(np.log2(np.maximum(tokens, TILE))))
