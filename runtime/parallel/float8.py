"""Products in fp8 through torchao's float8 linears, for the linear modules that a plan names.

Each operand is scaled by row before its product (e4m3, scales rounded down to powers of two): a token's
activations by their largest, an output channel's weights by theirs. So no scale depends on other ranks, and
an outlier costs its own row alone. Weights, their gradients, what FSDP gathers and what is kept for backward
stay as they are in bf16, and only the class of the module changes: parameters, names and values do not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from shipway.runtime.exit_codes import Fatal

RECIPE = "rowwise"
CAPABILITY = (8, 9)
"""Compute capability of the first CUDA devices with products in fp8 (Ada; Hopper is 9.0)."""


def apply_float8(model: nn.Module, linears: Collection[str], device: torch.device) -> None:
    """Make the named linear modules multiply in fp8, in place; a part of a model may hold few of them.

    On a CPU torchao emulates it: operands are rounded to fp8, products of them taken in fp32. Plans are
    refused there; tests and the parity table are not. Raises Fatal where device or torchao is missing.
    """
    if not linears:
        return
    check_device(device)
    torchao = _torchao()
    config = torchao.Float8LinearConfig.from_recipe_name(RECIPE)
    torchao.convert_to_float8_training(
        model,
        config=replace(config, emulate=device.type == "cpu"),
        module_filter_fn=lambda module, name: name in linears,
    )


def check_linears(model: nn.Module, linears: Collection[str]) -> None:
    """Raise Fatal when a whole model lacks a linear module that the plan names."""
    there = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = [name for name in linears if name not in there]
    if missing:
        raise Fatal(
            f"model.py has no linear module {missing[0]}, which the plan multiplies in fp8:"
            " build the plan again, or plan with training.precision {compute: bf16}"
        )


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device has products in fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def check_device(device: torch.device) -> None:
    """Raise Fatal on a GPU that has no products in fp8."""
    way_out = "plan with training.precision {compute: bf16}"
    if device.type == "cuda" and not multiplies_fp8(device):
        name = torch.cuda.get_device_name(device)
        raise Fatal(f"{name} has no products in fp8, which this plan was made with: {way_out}")


def _torchao() -> Any:
    if find_spec("torchao") is None:
        raise Fatal(
            "training.precision.compute: fp8 needs torchao: pip install shipway[gpu],"
            " or plan with training.precision {compute: bf16}"
        )
    with _quiet("torchao", "torch.utils._pytree"):
        import torchao.float8
    return torchao.float8


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """torchao warns about kernels of its own that do not load, none of which its float8 linears use."""
    before = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
