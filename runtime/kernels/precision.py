"""The one rule of precision that every plain kernel follows."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays as it is (references run in it); everything else is computed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype that sums and exponentials are computed in."""
    return x.to(compute_dtype(x.dtype))
