"""Recomputation in backward: nothing, the cheap operators, or whole layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shipway.schemas.layout import Recompute

MATRIX_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "linear",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operators whose outputs selective recomputation keeps: they cost the most and return the least."""


def apply_recompute(model: nn.Module, policy: Recompute) -> None:
    """Make every layer run its forward again in backward, whole or all but its matrix products."""
    if policy == "none":
        return
    context: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None
    if policy == "selective":
        context = partial(create_selective_checkpoint_contexts, _keep_products(_kept_operators()))
    for layer in model.layers.values():
        run = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        # Replacing the method, not the module, keeps every parameter's name.
        layer.forward = partial(run, context_fn=context) if context else run


def _kept_operators() -> frozenset[Any]:
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in MATRIX_PRODUCTS if hasattr(aten, name)]
    operators = (getattr(packet, overload) for packet in packets for overload in packet.overloads())
    # What writes into an argument (out=...) can't be kept: the argument would stay unwritten.
    return frozenset(operator for operator in operators if not operator._schema.is_mutable)


def _keep_products(kept: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
