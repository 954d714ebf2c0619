"""Newton-Schulz orthogonalisation of momentum matrices (Muon; arXiv 2502.16982, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic whose five-fold iteration sends singular values in (0, 1] close to 1."""

SLICE_ELEMENTS = 2**25
"""Elements of a stack that are worked on at a time: products are large enough, and scratch stays bounded."""


def orthogonalise(matrices: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly, of each of `matrices` [n, rows, columns]; fp32 out.

    X <- a X + (b A + c A A) X with A = X X^T, on whichever side is smaller, from X of unit
    Frobenius norm. Products run in `dtype` (bf16 suffices).
    """
    if len(matrices) > 1 and matrices.numel() > SLICE_ELEMENTS:
        each = max(1, SLICE_ELEMENTS // matrices[0].numel())
        out = torch.empty_like(matrices, dtype=torch.float32)
        for some, place in zip(matrices.split(each), out.split(each), strict=True):
            place.copy_(orthogonalise(some, steps, dtype))
        return out
    a, b, c = COEFFICIENTS
    x = matrices.float()
    x = (x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)).to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        # Sums inside the products: passes of their own would take as long as the products.
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()
