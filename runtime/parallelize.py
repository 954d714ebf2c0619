"""From a single-device model to this rank's part of it, in one fixed order.

Linear modules that multiply in fp8 become so first; tp, ep, cp rewrite how modules compute; pictures are
shared over tp and cp; blocks are compiled if asked for; recomputation wraps what they have become; FSDP
shards what is left; the pipeline's schedule stands around all. The model is built without memory, spread,
and only then materialised and initialised, so that no rank ever holds more than its part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from shipway.runtime.initialise import initialise
from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.compilation import apply_compilation
from shipway.runtime.parallel.context import apply_context_parallel
from shipway.runtime.parallel.data import DTYPES, FP32_SUFFIXES, apply_fsdp
from shipway.runtime.parallel.expert import apply_expert_parallel
from shipway.runtime.parallel.float8 import apply_float8, check_linears
from shipway.runtime.parallel.offload import apply_offloaded_recompute
from shipway.runtime.parallel.pictures import apply_picture_parallel
from shipway.runtime.parallel.pipeline import Chunk, Pipeline, chunks_of, keep_chunk
from shipway.runtime.parallel.recompute import apply_recompute
from shipway.runtime.parallel.tensor import apply_tensor_parallel
from shipway.schemas.training import Compilation, Precision


@dataclass(frozen=True)
class ParallelModel:
    """The parts of the model that this rank holds (one per virtual pipeline stage)."""

    parts: tuple[nn.Module, ...]
    mesh: Mesh
    pipeline: Pipeline | None = None
    """What runs the parts when there is more than one pipeline rank."""

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """All trainable parameters of this rank, by the single-device model's names."""
        return {name: p for part in self.parts for name, p in part.named_parameters() if p.requires_grad}

    def count(self) -> int:
        """Parameters of the whole model, balancing biases included; every rank must call it."""
        biases = [
            b for part in self.parts for name, b in part.named_buffers() if name.endswith("balance_bias")
        ]
        mine = sum(p.numel() for part in self.parts for p in part.parameters()) + sum(
            b.numel() for b in biases
        )
        total = torch.tensor(mine, dtype=torch.int64, device=self.mesh.device)
        return int(self.mesh.all_reduce(total, ["pp"]))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of the model."""
        return {name: value for part in self.parts for name, value in part.state_dict().items()}


@dataclass(frozen=True)
class Arithmetic:
    """How a model computes, whatever the layout."""

    precision: Precision
    compilation: Compilation = "none"
    fp8_linears: Collection[str] = ()
    """Linear modules whose products run in fp8, by name, as the plan has them."""


def build_parallel_model(
    module: ModuleType,
    mesh: Mesh,
    precision: Precision,
    seed: int,
    compilation: Compilation = "none",
    fp8_linears: Collection[str] = (),
) -> ParallelModel:
    """Instantiate `module.Model`, spread it by the mesh's layout, and initialise it from `seed`."""
    arithmetic = Arithmetic(precision, compilation, fp8_linears)
    with torch.device("meta"):
        whole = module.Model()
    check_linears(whole, fp8_linears)
    if mesh.size("pp") == 1:
        return ParallelModel((_build_part(whole, mesh, arithmetic, seed),), mesh)
    chunks = chunks_of(whole, mesh.layout, mesh.rank("pp"))
    parts = tuple(_build_chunk(module, chunk, mesh, arithmetic, seed) for chunk in chunks)
    pipeline = Pipeline(parts, chunks, mesh, DTYPES[precision.activations], whole.norm.weight.shape[0])
    return ParallelModel(parts, mesh, pipeline)


def _build_chunk(
    module: ModuleType, chunk: Chunk, mesh: Mesh, arithmetic: Arithmetic, seed: int
) -> nn.Module:
    with torch.device("meta"):
        model = module.Model()
    keep_chunk(model, chunk)
    return _build_part(model, mesh, arithmetic, seed)


def _build_part(model: nn.Module, mesh: Mesh, arithmetic: Arithmetic, seed: int) -> nn.Module:
    """Spread a model (or chunk) on the meta device, and only then give it memory and values."""
    _set_master_dtype(model, arithmetic.precision)
    parallelize(model, mesh, arithmetic)
    model.to_empty(device=mesh.device)
    initialise(model, seed)
    model.train()
    return model


def parallelize(model: nn.Module, mesh: Mesh, arithmetic: Arithmetic) -> None:
    """Apply every axis of the mesh to a model on the meta device, in place and in order."""
    precision, fp8 = arithmetic.precision, arithmetic.precision.compute == "fp8"
    apply_float8(model, arithmetic.fp8_linears, mesh.device)
    apply_tensor_parallel(model, mesh)
    apply_expert_parallel(model, mesh)
    apply_context_parallel(model, mesh)
    apply_picture_parallel(model, mesh)
    apply_compilation(model, mesh.device, arithmetic.compilation, fp8=fp8)
    if mesh.layout.offloads_activations:
        apply_offloaded_recompute(model, mesh.device)
    else:
        apply_recompute(model, mesh.layout.recompute)
    apply_fsdp(model, mesh, precision)


def _set_master_dtype(model: nn.Module, precision: Precision) -> None:
    """Parameters in the master precision, but for those that stay in fp32."""
    dtype = DTYPES[precision.master]
    for name, parameter in model.named_parameters():
        if name.rsplit(".", 1)[-1] not in FP32_SUFFIXES and not name.endswith("router.weight"):
            parameter.data = parameter.data.to(dtype)
