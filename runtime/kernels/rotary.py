"""Rotary position embedding (arXiv 2104.09864) and its YaRN extension (arXiv 2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .elementwise import fuse
from .precision import compute_dtype, widen


@dataclass(frozen=True)
class Yarn:
    """Context extension by `factor` from `original_context` tokens; the fields are the schema's."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_scale: float = 1.0

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by: (0.1 m ln(factor) + 1)^2, 1 when nothing is extended."""
        if self.factor <= 1:
            return 1.0
        return (0.1 * self.attention_scale * math.log(self.factor) + 1.0) ** 2


def frequencies(
    width: int, theta: float, yarn: Yarn | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Radians per token [width / 2] in float64.

    YaRN (its Eq. 17 and 18): a channel that turns more than `beta_fast` times within the original
    context is kept, one that turns less than `beta_slow` times is slowed by `factor`, with a linear
    ramp over the channels between, whose ends are rounded outwards to whole channels.
    """
    if width % 2:
        raise ValueError(f"rotary needs an even width, not {width}")
    base = theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    if yarn is None:
        return base

    def channel(turns: float) -> float:
        return width * math.log(yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), width - 1)
    index = torch.arange(width // 2, dtype=torch.float64, device=device)
    slowed = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    return base * (1 - slowed) + base / yarn.factor * slowed


def rotary(
    x: Tensor, positions: Tensor, theta: float, yarn: Yarn | None = None, *, interleaved: bool = False
) -> Tensor:
    """Rotate `x` [B, T, H, R] by `positions` [B, T]; angles in float64, the rotation in fp32.

    Channel pairs are (i, i + R/2), as in Llama; `interleaved` pairs (2i, 2i + 1), as DeepSeek-V3's
    published weights do, and keeps that order.
    """
    angle = positions.to(torch.float64).unsqueeze(-1) * frequencies(x.shape[-1], theta, yarn, x.device)
    cos, sin = (part.to(compute_dtype(x.dtype)).unsqueeze(2) for part in (angle.cos(), angle.sin()))
    return _rotate(x, cos, sin, interleaved)


@fuse
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`x` [B, T, H, R] by `cos` and `sin` [B, T, 1, R/2]."""
    wide = widen(x)
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return joined.to(x.dtype)
