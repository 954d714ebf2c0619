"""Delta attention by itself: a token's cost as the context grows, and what the bounded decay is worth."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.contenders.own import Case
from bench.decay import measure
from shipway.runtime.build_folder import import_model
from shipway.runtime.calibration.timing import time_operation

KEPT_FP32 = ("dt_bias", "a_log")
REPEATS = 5
KERNEL_HEADS = 8


def contexts(case: Case, device_kind: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """One delta-attention block, forward and backward; shorter contexts have more rows, to as many tokens."""
    device = torch.device(device_kind)
    attention = delta_attention(case, device)
    dtype = attention.q_proj.weight.dtype
    total, width = max(lengths), case.plan.blueprint.model.width
    rows = []
    for length in lengths:
        x = torch.randn(total // length, length, width, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn_like(x)

        def forward_backward(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
            attention(x, None).backward(weight)

        seconds = time_operation(forward_backward, device, repeats=REPEATS).seconds
        rows.append(
            {"context_tokens": length, "tokens": total, "seconds": seconds, "per_token": seconds / total}
        )
        attention.zero_grad(set_to_none=True)
    growth = rows[-1]["per_token"] / rows[0]["per_token"] - 1
    return {"lengths": rows, "growth": growth, "parameters": sum(p.numel() for p in attention.parameters())}


def delta_attention(case: Case, device: torch.device) -> nn.Module:
    """The first layer's attention of a build, with initial weights in training precision."""
    module = import_model(case.folder)
    with torch.device("meta"):
        model = module.Model()
    for name in list(model.layers)[1:]:
        del model.layers[name]
    model = model.to_empty(device=device)
    model.init_weights()
    attention: nn.Module = model.layers["0"].attention
    if device.type == "cuda":
        for name, parameter in attention.named_parameters():
            if not name.endswith(KEPT_FP32):
                parameter.data = parameter.data.bfloat16()
    return attention.train()


def decay(device_kind: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The delta kernel with both gates over one sequence of each length."""
    device = torch.device(device_kind)
    rows = []
    for length in lengths:
        found = measure(device, length, KERNEL_HEADS)
        total = {
            gate: found[f"{gate}_forward_seconds"] + found[f"{gate}_backward_seconds"]
            for gate in ("bounded", "unbounded")
        }
        speedup = total["unbounded"] / total["bounded"]
        rows.append({"tokens": length, "heads": KERNEL_HEADS, **found, "speedup": speedup})
    return {"lengths": rows}
