"""The imports that a generated model needs: those that its text names."""

from __future__ import annotations

import re

KERNELS = (
    "DeltaCore",
    "SoftmaxCore",
    "Yarn",
    "add_margins",
    "attention_residual",
    "auxiliary_loss",
    "delta_step",
    "expert_load",
    "gated_rms_norm",
    "grouped_mm",
    "latent_attention_step",
    "linear_cross_entropy",
    "order_by_expert",
    "permute",
    "positions_from",
    "project",
    "rms_norm",
    "rotary",
    "router_logits",
    "short_convolution",
    "sigmoid_gate",
    "situ_glu",
    "swiglu",
    "unpermute",
    "update_quantile_bias",
    "update_sign_bias",
)
"""What templates take from `shipway.runtime.kernels`."""
STANDARD = (
    (r"\bmath\.", "import math"),
    (r"\bzlib\.", "import zlib"),
    (r"\bCallable\b|\bIterator\b", "from collections.abc import {}"),
    (r"@dataclass\b", "from dataclasses import dataclass"),
    (r"\bpartial\(", "from functools import partial"),
)
"""Pattern in the text, and the standard library's module that it stands for."""


def imports(text: str) -> tuple[str, ...]:
    """Import lines, in ruff's order; empty strings part the sections."""
    standard = []
    for pattern, line in STANDARD:
        found = sorted(set(re.findall(pattern, text)))
        if found:
            standard.append(line.format(", ".join(found)))
    torch = ["import torch"]
    if re.search(r"\bF\.", text):
        torch.append("import torch.nn.functional as F")
    torch.append("from torch import Tensor, nn")
    names = [name for name in KERNELS if re.search(rf"\b{name}\(", text)]
    kernels = ["from shipway.runtime.kernels import (", *(f"    {name}," for name in names), ")"]
    return (*standard, "", *torch, "", *kernels)
