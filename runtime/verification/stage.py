"""One stage of a build, trained for a few steps and measured."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn

from shipway.runtime.build_folder import import_model, read_plan
from shipway.runtime.data.batch import Batch
from shipway.runtime.garbage import Garbage
from shipway.runtime.memory_watch import measure, peak_bytes
from shipway.runtime.mesh import MeshPool
from shipway.runtime.schedules import learning_rate
from shipway.runtime.shards import local_tensor
from shipway.runtime.stage import build_trainer, open_loader
from shipway.runtime.trainer import Trainer
from shipway.runtime.verification.kernel_names import KernelTimes, kernel_times
from shipway.runtime.verification.peak import holders, record
from shipway.schemas.plan import Plan, StagePlan
from shipway.schemas.verification import RankMemory, StageReading

WARM_UP = 3
"""Steps before anything is read: kernels are compiled, optimizer state is made, the allocator settles."""


@dataclass
class Phases:
    """Follows one step through its phases, waiting for the device at each; peaks are read by phase."""

    trainer: Trainer
    profile: torch.profiler.profile | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    gradients: int = 0
    _name: str = ""
    _began: float = 0.0

    def begin(self, name: str) -> None:
        """A phase of Trainer.step begins, or, with an empty name, the step has ended."""
        self._end()
        if name == "gradients":
            gradients = (p.grad for p in self.trainer.model.named_parameters().values())
            self.gradients = sum(_bytes(g) for g in gradients if g is not None)
            name = "update"  # the norm and the clipping belong to the optimizer in a plan
        if self.profile:
            if name == "forward and backward":
                self.profile.__enter__()
            elif self._name == "forward and backward":
                self.profile.__exit__(None, None, None)
        self._name, self._began = name, time.perf_counter()

    def _end(self) -> None:
        device = self.trainer.model.mesh.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if not self._name:
            return
        spent = time.perf_counter() - self._began
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + spent
        peak = peak_bytes(device)
        if peak:
            self.peaks[self._name] = max(peak[0], self.peaks.get(self._name, 0))
            torch.cuda.reset_peak_memory_stats(device)


def measure_stage(
    build: Path,
    name: str | None,
    device: torch.device,
    meshes: MeshPool,
    steps: int,
    documents: bool,
    told: bool = False,
) -> StageReading:
    """Train the stage `name` (the first if None) for WARM_UP and then `steps` steps; every rank must call it.

    With `documents` boundaries are those of the data; otherwise every sequence counts as one document, which
    is what a plan's times assume. With `told` what holds memory at the peak is told line by line, which is
    slow.
    """
    plan, began = read_plan(build), time.perf_counter()
    stage = next(s for s in plan.stages if name in (None, s.name))
    trainer = build_trainer(plan, import_model(build), stage, device, meshes)
    loader = open_loader(plan, build, stage, trainer.model.mesh)
    _say(build, f"made in {time.perf_counter() - began:.1f} s")
    try:
        step = _Step(plan, stage, trainer, loader.next_step, documents)
        return _read(build, plan, stage, trainer, step, steps, told)
    finally:
        loader.close()
        _say(build, f"done in {time.perf_counter() - began:.1f} s")


def forget(device: torch.device) -> None:
    """Give back what a stage held, so that the next one starts from an empty allocator."""
    torch._dynamo.reset()  # forms compiled for one model count against the next one's, and may hold tensors
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@dataclass
class _Step:
    """Trains the next step each time it is called."""

    plan: Plan
    stage: StagePlan
    trainer: Trainer
    next_batches: Callable[[], Sequence[Batch]]
    documents: bool
    garbage: Garbage = field(default_factory=Garbage)
    done: int = 0

    def __call__(self, on_phase: Callable[[str], None] = lambda name: None) -> float:
        """Seconds from the data to the end of the update."""
        asked = self.plan.blueprint.training.stage(self.stage.name)
        rate = learning_rate(asked.learning_rate, min(self.done, self.stage.steps - 1), self.stage.steps)
        device = self.trainer.model.mesh.device
        began = time.perf_counter()
        batches = [batch if self.documents else _whole_rows(batch) for batch in self.next_batches()]
        self.trainer.step(batches, rate, on_phase)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.garbage.step_ends()
        self.done += 1
        return time.perf_counter() - began


def _whole_rows(batch: Batch) -> Batch:
    rows, tokens = batch.tokens.shape
    return replace(batch, cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * tokens)


def _read(
    build: Path, plan: Plan, stage: StagePlan, trainer: Trainer, step: _Step, steps: int, told: bool
) -> StageReading:
    warm_up = [step() for _ in range(WARM_UP)]
    _say(build, f"warm-up steps of {', '.join(f'{seconds:.1f}' for seconds in warm_up)} s")
    device, mesh = trainer.model.mesh.device, trainer.model.mesh
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [step() for _ in range(steps)]
    peak = peak_bytes(device) or (0, 0)
    outside = _outside_bytes(device)
    phases = Phases(trainer)
    kept = _kept_bytes(trainer, lambda: _phased(step, phases))
    held: dict[str, int] = {}
    if told:
        record(device)
        step()
        held = holders(device)
    memory = _rank_memory(trainer, peak, outside, phases, kept, held)
    times = _profiled(step, trainer) if device.type == "cuda" else KernelTimes()
    return StageReading(
        build=str(build),
        plan_hash=plan.hash,
        stage=stage.name,
        layout=mesh.layout,
        outcome="measured",
        steps=steps,
        ranks=_of_all_ranks(memory),
        step_seconds=statistics.median(seconds),
        phase_seconds=phases.seconds,
        kernel_seconds=times.seconds,
        communication_seconds=times.communication,
        kernels=times.count,
        slowest_kernels=times.slowest,
    )


def _say(build: Path, what: str) -> None:
    if not dist.get_rank():
        print(f"{build.name}: {what}", flush=True)


def _phased(step: _Step, phases: Phases) -> None:
    step(phases.begin)
    phases.begin("")


def _kept_bytes(trainer: Trainer, run: Callable[[], None]) -> int:
    """What a forward leaves allocated while `run` trains a step: the largest of its micro-batches.

    Under a pipeline forwards of several micro-batches interleave, and 0 is returned.
    """
    if trainer.model.pipeline or trainer.model.mesh.device.type != "cuda":
        run()
        return 0
    (model,) = trainer.model.parts
    before, kept = [0], [0]

    def enter(module: nn.Module, inputs: object) -> None:
        before[0] = torch.cuda.memory_allocated()

    def leave(module: nn.Module, inputs: object, output: object) -> None:
        kept[0] = max(kept[0], torch.cuda.memory_allocated() - before[0])

    handles = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
    run()
    for handle in handles:
        handle.remove()
    return kept[0]


def _rank_memory(
    trainer: Trainer,
    peak: tuple[int, int],
    outside: int,
    phases: Phases,
    kept: int,
    holder_bytes: dict[str, int],
) -> RankMemory:
    held = measure(trainer, peak[0])
    return RankMemory(
        rank=dist.get_rank(),
        pipeline_rank=trainer.model.mesh.rank("pp"),
        allocated_bytes=peak[0],
        reserved_bytes=peak[1],
        outside_bytes=outside,
        parameter_bytes=held.parameters,
        optimizer_bytes=held.optimizer,
        gradient_bytes=phases.gradients,
        kept_bytes=kept,
        phase_peak_bytes=phases.peaks,
        holder_bytes=holder_bytes,
    )


def _outside_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def _profiled(step: _Step, trainer: Trainer) -> KernelTimes:
    """Kernels of one step's forward and backward on rank 0; the other ranks train along."""
    if dist.get_rank():
        step()
        return KernelTimes()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    _phased(step, Phases(trainer, profile))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return kernel_times(json.loads(path.read_text())["traceEvents"])


def _of_all_ranks(memory: RankMemory) -> tuple[RankMemory, ...]:
    found: list[RankMemory | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, memory)
    return tuple(rank for rank in found if rank is not None)


def _bytes(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
