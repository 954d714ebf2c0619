"""Pipeline parallel: each rank keeps the layers of its model chunks, torch's schedules run them.

A chunk is the generated model with the rest left out, under the names of the whole model. What passes
between chunks is the hidden state, or with attention residuals the stack of sources [S, B, T, D], whose
S grows with depth. Its shape is computed here, so that torch need not run the model to find out (which
would count tokens in the routers twice). Pictures of all sizes do not stack over micro-batches: they wait on
the ranks of the first chunk, in host memory, until the schedule begins theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from shipway.runtime.data.batch import Batch
from shipway.runtime.data.packing import IGNORED
from shipway.runtime.evaluation.scorer import Scores, model_scorer
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.split_backward import SplitStage, whole_backward
from shipway.schemas.layout import V_SHAPED, Layout, Schedule

SCHEDULES: dict[Schedule, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""torch's classes; 1F1B alone takes one stage, the others the stages of all chunks."""


@dataclass(frozen=True)
class Chunk:
    """A run of layers on one rank."""

    number: int
    """Place in the model, from 0."""
    first_layer: int
    end_layer: int
    is_last: bool
    sources: int | None
    """Tensors that enter it, stacked; None where one hidden state does."""
    sources_after: int | None

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.number == 0


def chunks_of(model: nn.Module, layout: Layout, rank: int) -> tuple[Chunk, ...]:
    """The chunks of pipeline rank `rank` of a whole model; raises Fatal when it cannot be cut so."""
    problem = _problem(model, layout)
    if problem:
        raise Fatal(f"{problem}; plan with training.layout {{pipeline_parallel: 1}}")
    sources = [_sources(model, end) for _, end in ((0, 0), *layout.stage_layers)]
    chunks = len(layout.stage_layers)
    return tuple(
        Chunk(n, *layout.stage_layers[n], n == chunks - 1, sources[n], sources[n + 1])
        for n in layout.chunks_on(rank)
    )


def _problem(model: nn.Module, layout: Layout) -> str | None:
    """Why a model cannot run in a pipeline, if so."""
    chunks = layout.pipeline_parallel * layout.virtual_stages
    if getattr(model, "head", None) is None:
        return "pipeline parallel cannot run tied embeddings: first and last stage would share a matrix"
    if getattr(model, "prediction", None) is not None:
        return "pipeline parallel cannot run multi-token prediction"
    ends = [0, *(end for _, end in layout.stage_layers)]
    starts = [start for start, _ in layout.stage_layers]
    if len(starts) != chunks or starts != ends[:-1] or ends[-1] != len(model.layers):  # type: ignore[arg-type]
        return f"the plan's stages {layout.stage_layers} do not cut the layers into {chunks} chunks"
    return _schedule_problem(layout)


def _schedule_problem(layout: Layout) -> str | None:
    """Why torch's schedule would not take the chunks and micro-batches of a layout, if so."""
    kind, pp, count = layout.schedule, layout.pipeline_parallel, layout.micro_batches
    if kind in V_SHAPED and layout.virtual_stages != 2:
        return f"{kind} puts two chunks on every pipeline rank, the plan has {layout.virtual_stages}"
    least = 2 * pp if kind == "dualpipev" else pp
    if count < least:
        many = "twice as many" if least > pp else "at least as many"
        return (
            f"pipeline parallel {pp} under {kind} needs {many} micro-batches,"
            f" there are {count}: raise the global batch or lower data parallel"
        )
    rounds = max(1, count // pp)
    if kind == "interleaved_1f1b" and count % rounds:
        return f"interleaved 1F1B cannot run {count} micro-batches in {rounds} equal rounds"
    return None


def _sources(model: nn.Module, layers: int) -> int | None:
    """Sources over depth after so many layers; None without attention residuals."""
    if not hasattr(next(iter(model.layers.values())), "attention_residual"):  # type: ignore[operator]
        return None
    before = list(model.layers.values())[:layers]  # type: ignore[operator]
    opened = [layer.opens_block if hasattr(layer, "opens_block") else 2 for layer in before]
    return 1 + sum(opened)


def keep_chunk(model: nn.Module, chunk: Chunk) -> None:
    """Leave out of a whole model on the meta device what is not this chunk's."""
    for name in list(model.layers):  # type: ignore[arg-type]
        if not chunk.first_layer <= int(name) < chunk.end_layer:
            del model.layers[name]  # type: ignore[operator]
    absent = [] if chunk.is_first else ["embed", "vision"]
    absent += [] if chunk.is_last else ["output_residual", "norm", "head"]
    for name in absent:
        if hasattr(model, name):
            setattr(model, name, None)


class _Attach(torch.autograd.Function):
    """Lets a scalar be part of the loss that backward starts from a hidden state."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scalar: Tensor) -> Tensor:
        ctx.save_for_backward(scalar)
        return hidden.detach()  # no view: torch detaches a stage's output in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


def auxiliary_loss(part: nn.Module, labels: Tensor) -> Tensor | None:
    """The load-balancing loss of a chunk's last forward, as the whole model would add it; None without."""
    found = [loss for m in part.modules() if (loss := getattr(m, "auxiliary_loss", None)) is not None]
    if not found:
        return None
    weight: float = type(part).forward.__globals__["AUXILIARY_WEIGHT"]  # of the generated module
    return weight * (labels != IGNORED).sum(1).float() @ torch.stack(found).sum(0)


@dataclass
class Pipeline:
    """This rank's part of the pipeline; torch's schedule is made for the first micro-batches' shape."""

    parts: Sequence[nn.Module]
    chunks: Sequence[Chunk]
    mesh: Mesh
    dtype: torch.dtype
    """Of the hidden state."""
    width: int
    _schedules: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    _valid_tokens: int = 1
    _loss_sum: Tensor | None = None
    _waiting: Sequence[Batch] = ()
    """The micro-batches of the step under way, for what is not stacked over them."""

    def __post_init__(self) -> None:
        for part in self.parts:
            # Replacing the method, not the module, keeps every parameter's name.
            part.forward = partial(self._forward, part)

    def _forward(
        self,
        part: nn.Module,
        tokens: Tensor,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        number: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The generated forward for torch's stages, which cut [1, n] boundaries from a stack of them.

        `number` [1] is that of the micro-batch, on the CPU.
        """
        if cu_seqlens is not None and cu_seqlens.dim() == 2:
            cu_seqlens = cu_seqlens.squeeze(0)
        if number is not None and part.embed is not None:
            options |= self._pictures(int(number))
        if part.norm is not None:
            out: Tensor = type(part).forward(part, tokens, labels, cu_seqlens, **options)
            return out
        state = part.run(tokens, cu_seqlens, **options)  # type: ignore[operator]
        hidden = torch.stack(state) if isinstance(state, list) else state
        auxiliary = None if labels is None else auxiliary_loss(part, labels)
        if auxiliary is None or self._loss_sum is None:
            return hidden
        self._loss_sum += auxiliary.detach()
        attached: Tensor = _Attach.apply(hidden, auxiliary / self._valid_tokens)
        return attached

    def forward_backward(self, batches: Sequence[Batch], valid_tokens: int) -> Tensor:
        """Accumulate gradients of the loss summed and divided by `valid_tokens`.

        Returns this rank's part of the sum: the last chunk's loss, other chunks' auxiliary losses.
        """
        device = self.mesh.device
        tokens = torch.cat([batch.tokens.to(device, non_blocking=True) for batch in batches])
        labels = torch.cat([batch.labels.to(device, non_blocking=True) for batch in batches])
        bounds = _stacked([batch.cu_seqlens.to(device, non_blocking=True) for batch in batches])
        self._waiting = batches
        numbers = torch.arange(len(batches))
        self._valid_tokens = max(1, valid_tokens)
        self._loss_sum = torch.zeros((), device=self.mesh.device)
        schedule = self._schedule(len(batches), *batches[0].tokens.shape)
        inputs = (tokens,) if self.chunks[0].is_first else ()
        target = labels if self.chunks[-1].is_last else None
        schedule.step(
            *inputs, target=target, labels=labels, cu_seqlens=bounds, number=numbers, return_outputs=False
        )
        self._waiting = ()
        return self._loss_sum

    def _pictures(self, number: int) -> dict[str, tuple[Tensor, ...]]:
        """Keyword arguments of the first chunk for micro-batch `number`, on the device."""
        return {
            name: tuple(x.to(self.mesh.device, non_blocking=True) for x in tensors)
            for name, tensors in self._waiting[number].image_arguments.items()
        }

    def _loss(self, loss: Tensor, labels: Tensor) -> Tensor:
        assert self._loss_sum is not None
        self._loss_sum += loss.detach()
        return loss / self._valid_tokens

    def _schedule(self, micro_batches: int, batch: int, tokens: int) -> Any:
        key = (micro_batches, batch, tokens)
        if key not in self._schedules:
            stages: list[Any] = [
                self._stage(part, chunk, batch, tokens)
                for part, chunk in zip(self.parts, self.chunks, strict=True)
            ]
            kind = self.mesh.layout.schedule
            taken = stages[0] if kind == "1f1b" else stages
            self._schedules[key] = SCHEDULES[kind](
                taken, micro_batches, loss_fn=self._loss, scale_grads=False
            )
        return self._schedules[key]

    def _stage(self, part: nn.Module, chunk: Chunk, batch: int, tokens: int) -> PipelineStage:
        device = self.mesh.device
        first, last = (
            self.hidden(chunk.sources, batch, tokens),
            self.hidden(chunk.sources_after, batch, tokens),
        )
        if chunk.is_first:
            first = torch.empty(batch, tokens, dtype=torch.int64, device="meta")
        if chunk.is_last:
            last = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        layout, group = self.mesh.layout, self.mesh.group("pp")
        about = part, chunk.number, len(layout.stage_layers), device, (first,), (last,)
        if layout.schedule in V_SHAPED:
            return SplitStage(*about, group=group, dw_builder=whole_backward(layout.recompute))
        return PipelineStage(*about, group=group)

    def hidden(self, sources: int | None, batch: int, tokens: int) -> Tensor:
        """What passes between two chunks, on the meta device."""
        shape: tuple[int, ...] = (batch, tokens // self.mesh.size("tp"), self.width)
        shape = shape if sources is None else (sources, *shape)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    @torch.no_grad()
    def score(self, batch: Batch) -> Scores:
        """Scores of a batch, chunk after chunk; every rank of the pipeline must be given the same."""
        group, layout = self.mesh.group("pp"), self.mesh.layout
        here = self.mesh.rank("pp")
        rows, tokens = batch.tokens.shape
        x = batch.tokens
        for part, chunk in zip(self.parts, self.chunks, strict=True):
            if not chunk.is_first and layout.rank_of(chunk.number - 1) != here:
                x = torch.empty_like(self.hidden(chunk.sources, rows, tokens), device=self.mesh.device)
                dist.recv(x, group=group, group_src=layout.rank_of(chunk.number - 1))
            if chunk.is_last:
                scores = model_scorer(part)(replace(batch, tokens=x, images=None))
                continue
            training = part.training
            part.eval()
            seen = batch.image_arguments if chunk.is_first else {}
            x = part(x, None, batch.cu_seqlens, **seen).contiguous()
            part.train(training)
            if layout.rank_of(chunk.number + 1) != here:
                dist.send(x, group=group, group_dst=layout.rank_of(chunk.number + 1))
        if not self.chunks[-1].is_last:
            scores = Scores(
                torch.empty(rows, tokens, device=self.mesh.device),
                torch.empty(rows, tokens, dtype=torch.bool, device=self.mesh.device),
            )
        last = layout.rank_of(len(layout.stage_layers) - 1)
        for tensor in (scores.loss, scores.correct):
            dist.broadcast(tensor, group=group, group_src=last)
        return scores


def _stacked(bounds: Sequence[Tensor]) -> Tensor:
    """Boundaries [micro-batches, n] of all micro-batches: those with fewer end in empty documents."""
    longest = max(len(b) for b in bounds)
    return torch.stack([torch.cat((b, b[-1:].expand(longest - len(b)))) for b in bounds])
