"""torch.compile on the blocks of a model, from outside, where a training programme asks for it.

A block is what has its own graph from end to end: an attention, a gated unit (dense or shared), a layer of
the vision tower, the projector. What dispatches to kernels of its own (attention cores, convolutions) is
left as it is inside them, and a mixture of experts around its shared experts too: its routing depends on
the data, and its experts are a group of FSDP's own. So a block breaks into the same few graphs whatever the
documents of a batch are. Only forward methods are replaced: parameters, hooks and names stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.kernels.dispatch import compiles_blocks
from shipway.runtime.parallel.data import all_layers
from shipway.runtime.parallel.expert import Meanwhile
from shipway.runtime.parallel.tensor import SplitForward
from shipway.schemas.training import Compilation

KERNELS = ("core", "q_conv", "k_conv", "v_conv")
"""Submodules of a block that are not traced into."""


BACKEND = "inductor"


def apply_compilation(
    model: nn.Module,
    device: torch.device,
    compilation: Compilation,
    *,
    fp8: bool = False,
) -> None:
    """Compile every block, after the axes have rewritten it and before recomputation wraps the layer.

    Selective recomputation keeps no product of a compiled block, but runs it again whole. Collectives of
    tensor parallel, and the exchange that expert parallel hides under shared experts, stay outside compiled
    code. Raises Fatal where this machine lacks a compiler.
    """
    if not compiles_blocks(device.type, compilation, fp8=fp8):
        return
    if BACKEND == "inductor":
        check_compiler(device.type)
    for block in blocks(model):
        for name in KERNELS:
            kernel = getattr(block, name, None)
            if kernel is not None:
                kernel.forward = torch.compiler.disable(kernel.forward)
        _compile(block)


def _compile(block: nn.Module) -> None:
    """Replace what the block computes by compiled code, inside what an axis does around it."""
    owner: Any = block
    name = "forward"
    waiting = getattr(block.forward, "__self__", None)
    if isinstance(waiting, Meanwhile):
        owner, name = waiting, "compute"
    if isinstance(getattr(owner, name), SplitForward):
        owner, name = getattr(owner, name), "inside"
    setattr(owner, name, torch.compile(getattr(owner, name), backend=BACKEND))


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What is compiled, outermost first; no block holds another."""
    for layer in all_layers(model).values():
        yield layer.attention
        feed_forward = layer.feed_forward
        unit = getattr(feed_forward, "shared", None) if hasattr(feed_forward, "experts") else feed_forward
        if unit is not None:
            yield unit
    vision = getattr(model, "vision", None)
    if vision is not None:
        yield from vision.layers
        yield vision.projector


def check_compiler(device_type: str) -> None:
    """Raise Fatal when what inductor needs is not here: a C++ compiler on CPUs, Triton on GPUs."""
    way_out = "install it, or set training.compile to none"
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise Fatal(
                f"training.compile: blocks needs a C++ compiler (g++ or clang++): {way_out}"
            ) from None
    elif not torch.utils._triton.has_triton():
        raise Fatal(f"training.compile: blocks needs Triton on {device_type}: {way_out}")
