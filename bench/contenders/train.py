"""Trains a peer as its users do, by the rules that Shipway's contender is under.

The same batches, one fused AdamW with the blueprint's hyper-parameters, the same clipping, no recomputation,
the device waited for at the end of each step; warm-up steps are left out and the median is taken.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.contenders.cases import Contender
from bench.contenders.own import SLOWEST, Case
from bench.contenders.peers import Peer, compile_layers
from shipway.runtime.data.loader import make_loader
from shipway.runtime.verification.kernel_names import kernel_times
from shipway.runtime.verification.stage import WARM_UP
from shipway.schemas.training import AdamW

Step = Sequence[Tensor]
"""Tokens of each micro-batch, [rows, context]."""


class MasterAdamW:
    """Fused AdamW on fp32 copies of bf16 weights, as Shipway's master weights are kept."""

    def __init__(self, parameters: Iterable[nn.Parameter], options: AdamW, learning_rate: float) -> None:
        self._parameters = list(parameters)
        self._masters = [p.detach().float().clone() for p in self._parameters]
        self._inner = fused_adamw(self._masters, options, learning_rate)

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters from the weights' gradients, and the weights from the masters."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)
        torch._foreach_copy_(self._parameters, self._masters)


def fused_adamw(parameters: Iterable[Tensor], options: AdamW, learning_rate: float) -> torch.optim.AdamW:
    """torch's fused kernel with a blueprint's hyper-parameters."""
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )


def train(peer: Peer, contender: Contender, case: Case, device_kind: str, steps: int) -> dict[str, Any]:
    """Train a peer for a few steps and measure it."""
    torch.set_num_threads(1)
    device = torch.device(device_kind)
    training = case.plan.blueprint.training
    assert isinstance(training.optimizer, AdamW)
    batches = _batches(case, WARM_UP + steps + 1, device)
    model = peer.make(device, torch.float32 if device_kind == "cpu" else torch.bfloat16)
    if contender.compiled:
        compile_layers(model)
    rate = training.stages[0].learning_rate.peak
    parameters = list(model.parameters())
    make = MasterAdamW if contender.states == "master" else fused_adamw
    optimizer = make(parameters, training.optimizer, rate)

    def step(micro_batches: Step) -> float:
        began = time.perf_counter()
        for tokens in micro_batches:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / len(micro_batches)).backward()
        if training.gradient_clip is not None:
            nn.utils.clip_grad_norm_(parameters, training.gradient_clip)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        _wait(device)
        return time.perf_counter() - began

    with _attention(device):
        seconds = [step(batch) for batch in batches[:WARM_UP]]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [step(batch) for batch in batches[WARM_UP:-1]]
        allocated, reserved = _peak(device)
        profiled = _profiled(lambda: step(batches[-1]), device)
    return {
        **case.rates(statistics.median(seconds)),
        "steps": steps,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "parameters": sum(p.numel() for p in parameters),
        "settings": {
            "compute": str(parameters[0].dtype).removeprefix("torch."),
            "master": "fp32" if contender.states == "master" else "bf16",
            "moments": "fp32" if contender.states == "master" else "bf16",
            "optimizer": "adamw",
            "compile": "layers" if contender.compiled else "none",
            "recompute": "none",
            **peer.settings,
        },
        **profiled,
    }


def _batches(case: Case, steps: int, device: torch.device) -> list[list[Tensor]]:
    """The batches that Shipway's contender trains on, each row as one document."""
    training = case.plan.blueprint.training
    loader = make_loader(case.stage, training.data, 0, 1, training.seed, case.folder)
    try:
        return [[batch.tokens.to(device) for batch in loader.next_step()] for _ in range(steps)]
    finally:
        loader.close()


def _attention(device: torch.device) -> AbstractContextManager[object]:
    """torch's fastest kernels first: cuDNN's takes keys and values of different widths, too."""
    if device.type == "cpu":
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    return sdpa_kernel([*order, SDPBackend.MATH], set_priority=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def _profiled(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Kernels of one whole step, by the categories of a plan."""
    if device.type != "cuda":
        run()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        times = kernel_times(json.loads(path.read_text())["traceEvents"])
    return {
        "kernel_seconds": times.seconds,
        "kernels": times.count,
        "slowest_kernels": dict(list(times.slowest.items())[:SLOWEST]),
    }
