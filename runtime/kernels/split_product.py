"""Products with an fp32 operand on tensor cores: what has 24 bits is the sum of three parts of eight.

A product of two bf16 numbers is exact in fp32, and so are sums of products of parts but for the order of
the additions (arXiv 1904.06376). Three products in bf16 take a fifth of the time of one in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import fuse

PARTS = 3
"""bf16 keeps 8 significant bits, fp32 24."""
UPPER_HALF = -0x10000
"""Bits of an fp32 number that bf16 keeps."""


@torch.library.custom_op("shipway::split_product", mutates_args=())
def split_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T, [T, E] in fp32, of `x` [T, D] in bf16 and `weight` [E, D] in fp32.

    One operator, so that selective recomputation keeps the sum and not its parts.
    """
    return _sum(*_product(x, torch.cat(_parts(weight)).mT).chunk(PARTS, 1))


@split_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=weight.dtype)


def gradient_of_input(grad: Tensor, weight: Tensor) -> Tensor:
    """grad @ weight, [T, D] in bf16, of `grad` [T, E] and `weight` [E, D] in fp32; to two parts of each."""
    high, low, _ = _parts(grad)
    weight_high, weight_low, _ = _parts(weight)
    return torch.cat((high, high, low), 1) @ torch.cat((weight_high, weight_low, weight_high))


def gradient_of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T @ x, [E, D] in fp32, of `grad` [T, E] in fp32 and `x` [T, D] in bf16."""
    return _sum(*_product(torch.cat(_parts(grad), 1).mT, x).chunk(PARTS))


@fuse
def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three in bf16, largest first, whose sum is `x`.

    Bits are cut off, as a compiler may take rounding to bf16 and back for nothing.
    """
    high = _upper(x)
    rest = x - high
    middle = _upper(rest)
    return high.bfloat16(), middle.bfloat16(), (rest - middle).bfloat16()


def _upper(x: Tensor) -> Tensor:
    """fp32 `x` cut to what bf16 holds, still in fp32."""
    return (x.view(torch.int32) & UPPER_HALF).view(torch.float32)


@fuse
def _sum(high: Tensor, middle: Tensor, low: Tensor) -> Tensor:
    """Smallest first."""
    return low + middle + high


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 operands, in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
