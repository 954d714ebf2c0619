"""Seconds of prefill and of one decoded token by roofline, for one pipeline stage's part of a model.

Decoding is bound by what must be read: weights once a step whatever the batch, of the routed experts
those that any token chose, each request's cache and state. Latent attention decodes absorbed: queries
meet the latents themselves (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). Requests and contexts may be
arrays of one shape.
"""

from __future__ import annotations

import numpy as np

from shipway.compiler.communication import Network
from shipway.compiler.frozen import frozen
from shipway.compiler.operators.base import (
    Attention,
    Elementwise,
    Gemm,
    Kernel,
    Number,
    Operator,
    Shard,
)
from shipway.compiler.operators.delta_attention import DeltaAttention
from shipway.compiler.operators.grouped_attention import GroupedAttention
from shipway.compiler.operators.latent_attention import LatentAttention
from shipway.compiler.serving_weights import Spread, parameter_bits
from shipway.compiler.timing import Machine, kernel_time, reached
from shipway.schemas.serving import WeightFormat

TILE_ROWS = 64
"""Fewest rows that a matrix unit works on, used or not."""


@frozen
class Server:
    """A stage's devices and the form that weights have on them."""

    products: Machine
    """Rates of matrix products, in the weights' arithmetic."""
    cores: Machine
    """Rates of everything else, in bf16."""
    network: Network
    spread: Spread
    form: WeightFormat
    chosen: float
    """Share of the routed experts that one token chooses; 0 without experts."""

    def shard(self, sequences: Number, context: Number) -> Shard:
        """One data-parallel rank's part of a batch."""
        return Shard(
            sequences=sequences, context=context, tensor=self.spread.tensor, expert=self.spread.expert
        )


def prefill_seconds(operator: Operator, server: Server, context: Number) -> Number:
    """One operator over a whole prompt of `context` tokens on each data-parallel rank."""
    shard = server.shard(np.ones_like(context), context)
    own = sum((_forward(kernel, server) for kernel in operator.kernels(shard)), 0.0)
    return own + _transfers(operator, server, shard)


def _forward(kernel: Kernel, server: Server) -> Number:
    rates = server.products if isinstance(kernel, Gemm) else server.cores
    return kernel_time(kernel, rates).forward


def decode_seconds(operator: Operator, server: Server, requests: Number, context: Number) -> Number:
    """One operator for one token of each of `requests` requests on every data-parallel rank: the slower of
    arithmetic and reading; no kernel is shorter than the shortest."""
    shard, rates = server.shard(requests, 1), server.cores
    kernels = operator.kernels(shard)
    touched = 1 - (1 - server.chosen) ** (requests * server.spread.data)
    compute = sum((_product(k, server, touched) for k in kernels if isinstance(k, Gemm)), 0.0)
    read, core = _state(operator, shard, context, server.spread.tensor)
    moved = _weights(operator, server, touched) + read
    moved = moved + sum((k.forward_bytes for k in kernels if isinstance(k, Elementwise)), 0.0)
    compute = compute + core / (rates.peak_flops * rates.efficiency.attention_forward.ceiling)
    launches = sum(k.kernels if isinstance(k, Elementwise) else 1 for k in kernels)
    floor = launches * rates.efficiency.kernel_seconds
    own = np.maximum(np.maximum(compute, rates.memory_seconds(moved)), floor)
    return own + _transfers(operator, server, shard)


def _product(kernel: Gemm, server: Server, touched: Number) -> Number:
    """Arithmetic of a product whose rows fill up a tile; its reading is counted with the weights."""
    e = server.products.efficiency
    groups, rows = kernel.groups, kernel.rows
    if kernel.grouped:
        busy = np.maximum(groups * touched, np.minimum(groups, 1.0))
        rows, groups = rows * groups / busy, busy
    ceiling = (e.grouped_gemm if kernel.grouped else e.gemm).ceiling * reached(e.gemm_inner, kernel.inner)
    work = 2.0 * np.maximum(rows, TILE_ROWS) * kernel.inner * kernel.columns * groups
    return work / (server.products.peak_flops * ceiling)


def _weights(operator: Operator, server: Server, touched: Number) -> Number:
    """Bytes of weights that one device reads; a tied head reads the embedding's, the embedding only rows."""
    if operator.block == "embedding":
        return 0.0
    size: Number = 0.0
    for parameter in operator.parameters():
        own = parameter.count * parameter_bits(parameter, server.form) / 8 / server.spread.share(parameter)
        size += own * touched if parameter.sharding == "expert" else own
    if not operator.parameters():
        products = [k for k in operator.kernels(server.shard(1.0, 1)) if isinstance(k, Gemm)]
        size = sum((k.inner * k.columns * 2 for k in products), 0.0)
    return size


def _state(operator: Operator, shard: Shard, context: Number, tensor: int) -> tuple[Number, Number]:
    """Bytes of state that one device reads and writes, and FLOPs of attention over the cache.

    Tensor parallel divides key-value heads and delta heads; it divides no latent, which every head reads.
    """
    requests, kept = shard.sequences, operator.decode_state()
    match operator:
        case LatentAttention():
            heads = operator.dims.heads / tensor
            per_key = 2 * heads * (operator.latent_width + operator.dims.kv_rank)
            return requests * context * kept.bytes_per_token, requests * context * per_key
        case GroupedAttention():
            core = next(k for k in operator.kernels(shard) if isinstance(k, Attention))
            per_key = 2 * core.heads * (core.key_width + core.value_width)
            return requests * context * kept.bytes_per_token / tensor, requests * context * per_key
        case DeltaAttention():
            return 2 * requests * kept.constant_bytes / tensor, 0.0
        case _:
            return 0.0, 0.0


def _transfers(operator: Operator, server: Server, shard: Shard) -> Number:
    seconds: Number = 0.0
    sizes = {"tp": server.spread.tensor, "ep": server.spread.expert, "cp": 1}
    for transfer in operator.transfers(shard):
        if transfer.phase == "forward" and sizes[transfer.axis] > 1:
            size = sizes[transfer.axis]
            seconds = seconds + server.network.collective_seconds(
                transfer.collective, transfer.bytes, size, 1
            )
    return seconds
