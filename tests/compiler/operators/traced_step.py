"""One optimizer step of one rank under a fake process group, and every collective that it issued.

The generated model, the runtime's own parallelisation, optimizer and trainer run as they would on the
rank; torch's `fake` backend answers collectives at once, so that a world of any size is one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shipway.runtime.data.batch import Batch, Images
from shipway.runtime.mesh import build_mesh
from shipway.runtime.optimizers import build_optimizer
from shipway.runtime.parallelize import build_parallel_model
from shipway.runtime.qk_clip import QkClip
from shipway.runtime.trainer import Trainer
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.layout import Layout
from shipway.schemas.training import Muon
from tests.templates.generated import load, next_labels, tokens_of


@dataclass(frozen=True, order=True)
class Call:
    """A collective as it was issued."""

    collective: str
    size: int
    """Ranks in the group."""
    stride: int
    """Distance between neighbours in the group, in ranks of the world."""
    bytes: int
    """all_gather: what it ends with; reduce_scatter, all_reduce: what it starts with; all_to_all: what
    this rank sends; send_receive: what it sends or receives."""


KINDS = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send_receive", 0),
    "recv_": ("send_receive", 0),
    "broadcast_": ("broadcast", 0),
}
"""Operators of c10d, and which argument's size counts."""


@dataclass
class Recorder(TorchDispatchMode):
    """Counts collectives over groups of more than one rank."""

    calls: Counter[Call] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._record(func._opname, args)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.recv_.default:
            _answer(args[0])
        return result

    def _record(self, name: str, args: Any) -> None:
        kind, place = KINDS[name]
        group = next(g for g in map(_group, args) if g is not None)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            tensors = [t for t in tree_leaves(args[place]) if isinstance(t, Tensor)]
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.calls[Call(kind, len(ranks), ranks[1] - ranks[0], size)] += 1


def _answer(received: Sequence[Tensor]) -> None:
    """What a peer would have sent: finite activations, and its agreement to the stages' stated shapes."""
    for tensor in received:
        tensor.fill_(0.01 if tensor.is_floating_point() else 1)


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except (RuntimeError, ValueError):
            return None  # the reduction's operator
    return None


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """This process as rank `rank` of a world that answers by itself."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds on to the meshes of this world


def traced_step(blueprint: Blueprint, layout: Layout, rank: int) -> Counter[Call]:
    """All collectives of rank `rank` in one optimizer step of a blueprint's first stage."""
    training, stage = blueprint.training, blueprint.training.stages[0]
    module = load(blueprint.model)
    with fake_world(rank, layout.world_size):
        mesh = build_mesh(layout, torch.device("cpu"))
        model = build_parallel_model(module, mesh, training.precision, seed=0)
        optimizer = build_optimizer(
            model.named_parameters(),
            module.OPTIMIZER_GROUPS,
            training.optimizer,
            training.precision,
            mesh.device,
            mesh,
        )
        latent = blueprint.model.attention.latent
        watch = training.optimizer.qk_clip if isinstance(training.optimizer, Muon) else None
        qk_clip = QkClip(model, latent, watch) if latent is not None and watch is not None else None
        trainer = Trainer(model, optimizer, training.gradient_clip, qk_clip)
        batches = [
            _batch(blueprint, layout.micro_batch, stage.context, n) for n in range(layout.micro_batches)
        ]
        if model.pipeline is not None:
            with Recorder():  # in their first step pipeline stages agree on shapes
                trainer.step(batches, learning_rate=1e-3)
        with Recorder() as recorder:
            result = trainer.step(batches, learning_rate=1e-3)
    assert result.finite  # otherwise nothing was updated
    return recorder.calls


def _batch(blueprint: Blueprint, rows: int, length: int, seed: int) -> Batch:
    tokens = tokens_of(blueprint.model, rows, length, seed)
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    batch = Batch(tokens, next_labels(tokens), bounds)
    training, vision = blueprint.training, blueprint.model.vision
    if vision is None or not training.data.has_images(training.stages[0].mix):
        return batch
    # a picture of one line of tokens fills every row
    grids = torch.tensor([[vision.merge, vision.merge * length]] * rows)
    patches = torch.randn(rows * length * vision.merge**2, 3 * vision.patch**2)
    token = blueprint.model.vocabulary - 1
    return replace(batch, tokens=torch.full_like(tokens, token), images=Images(patches, grids, token))
