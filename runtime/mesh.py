"""The ranks of one stage, arranged by the plan's layout; every axis has a name and may be of size 1.

Three views of the same ranks, because the same ranks play different parts:

    data     pp  dp_replicate  dp_shard  cp  tp      who reads and computes what
    dense    pp  dp_replicate  fsdp          tp      who holds what of the dense parameters
    expert   pp  dp_replicate  expert_shard  ep      who holds what of the routed experts

where fsdp = dp_shard x cp, and expert_shard x ep = dp_shard x cp x tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shipway.runtime.exit_codes import Fatal
from shipway.schemas.layout import Layout

_VIEW_OF_AXIS = {
    "pp": "data",
    "dp_replicate": "data",
    "dp_shard": "data",
    "cp": "data",
    "tp": "dense",
    "fsdp": "dense",
    "expert_shard": "expert",
    "ep": "expert",
}
AXES = frozenset(_VIEW_OF_AXIS)
"""Names of all axes."""


@dataclass(frozen=True)
class Mesh:
    """Process groups of one stage."""

    layout: Layout
    device: torch.device
    data: DeviceMesh
    dense: DeviceMesh
    expert: DeviceMesh
    _axes: dict[str, DeviceMesh] = field(default_factory=dict, repr=False, compare=False)

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of an axis."""
        if name not in self._axes:  # torch makes a new one at every look: milliseconds, many times a step
            view: DeviceMesh = getattr(self, _VIEW_OF_AXIS[name])
            self._axes[name] = view[name]
        return self._axes[name]

    def size(self, name: str) -> int:
        """Ranks along an axis."""
        return self.axis(name).size()

    def rank(self, name: str) -> int:
        """This rank's position along an axis."""
        return self.axis(name).get_local_rank()

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of this rank along an axis."""
        return self.axis(name).get_group()

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the samples this rank reads."""
        return self.rank("dp_replicate") * self.size("dp_shard") + self.rank("dp_shard")

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different samples."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def fsdp(self) -> DeviceMesh:
        """Mesh that FSDP shards dense parameters over; two-dimensional when there are replicas."""
        return self._with_replicas(self.dense, "fsdp")

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Mesh that FSDP shards each expert-parallel rank's experts over."""
        return self._with_replicas(self.expert, "expert_shard")

    def _with_replicas(self, view: DeviceMesh, shard: str) -> DeviceMesh:
        return view["dp_replicate", shard] if self.layout.data_parallel_replicate > 1 else view[shard]

    def all_reduce(
        self, tensor: Tensor, axes: Iterable[str], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Reduce `tensor` in place over the product of `axes` and return it."""
        for name in axes:
            if self.size(name) > 1:
                dist.all_reduce(tensor, op=op, group=self.group(name))
        return tensor


@dataclass
class MeshPool:
    """Views made once per process: equal ones are the same object, and none is ever closed.

    torch keeps results of sharding decisions by a mesh's ranks and names. A second, equal mesh would
    be given tensors that refer to the first, whose groups must therefore still be there.
    """

    device: torch.device
    _views: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)

    def view(self, axes: Mapping[str, int]) -> DeviceMesh:
        """All ranks arranged by axes, outermost first."""
        key = tuple(axes.items())
        if key not in self._views:
            shape, names = tuple(axes.values()), tuple(axes)
            self._views[key] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._views[key]


def build_mesh(layout: Layout, device: torch.device, pool: MeshPool | None = None) -> Mesh:
    """Arrange all ranks by `layout`; raises Fatal when their number is not the layout's.

    A process that builds more than one mesh must give the same `pool` to all.
    """
    world = dist.get_world_size()
    if layout.world_size != world:
        raise Fatal(f"the layout needs {layout.world_size} ranks, {world} are running")
    region = layout.data_parallel_shard * layout.context_parallel * layout.tensor_parallel
    if region % layout.expert_parallel:
        raise Fatal(f"expert_parallel {layout.expert_parallel} does not divide dp_shard x cp x tp = {region}")
    pool = pool or MeshPool(device)
    outer = {"pp": layout.pipeline_parallel, "dp_replicate": layout.data_parallel_replicate}
    fsdp = layout.data_parallel_shard * layout.context_parallel
    return Mesh(
        layout=layout,
        device=device,
        data=pool.view(
            outer
            | {
                "dp_shard": layout.data_parallel_shard,
                "cp": layout.context_parallel,
                "tp": layout.tensor_parallel,
            }
        ),
        dense=pool.view(outer | {"fsdp": fsdp, "tp": layout.tensor_parallel}),
        expert=pool.view(outer | {"expert_shard": layout.expert_shard, "ep": layout.expert_parallel}),
    )


def fit_layout(layout: Layout, world_size: int, sequences_per_step: int) -> Layout:
    """`layout` on another number of ranks: only the data-parallel degree and its micro-batches change.

    The optimizer step keeps its sequences, so that training is the same; raises Fatal with the
    possible numbers of ranks when that cannot be.
    """
    if layout.world_size == world_size:
        return layout
    fixed = layout.pipeline_parallel * layout.context_parallel * layout.tensor_parallel
    possible = [
        size
        for size in range(1, sequences_per_step // layout.micro_batch + 1)
        if sequences_per_step % (size * layout.micro_batch) == 0
        and (size * layout.context_parallel * layout.tensor_parallel) % layout.expert_parallel == 0
    ]
    data_parallel, rest = divmod(world_size, fixed)
    if rest or data_parallel not in possible:
        ranks = ", ".join(str(size * fixed) for size in possible)
        raise Fatal(f"{world_size} ranks do not fit this stage's layout; it can run on {ranks}")
    return layout.model_copy(
        update={
            "data_parallel_replicate": 1,
            "data_parallel_shard": data_parallel,
            "micro_batches": sequences_per_step // (data_parallel * layout.micro_batch),
        }
    )
