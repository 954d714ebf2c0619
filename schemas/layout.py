"""How one training stage is spread over the cluster: constraints asked for, and the layout chosen.

Mesh axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. Expert parallel (ep) folds the
innermost part of dp_shard x cp x tp; what is left of that product shards the experts (expert FSDP).
"""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from shipway.schemas.base import Schema

Schedule = Literal["none", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]
Zero = Literal[1, 2, 3]
"""What FSDP shards beside optimizer state and master weights: 1 nothing, 2 gradients, 3 parameters too."""
Offload = Literal["none", "optimizer", "activations", "both"]
"""What is kept in host memory: optimizer state (the moments), which one update a step reads; what layers keep
for backward when it recomputes them; or both."""
DeltaContext = Literal["state", "heads"]
"""What context parallel does about delta attention: pass the recurrent state from slice to slice, or exchange
slices of all heads for whole rows of some."""

V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules of two chunks a rank, down the ranks and back up: rank 0 has embedding and head."""

OPTIMIZER_OFFLOAD: tuple[Offload, ...] = ("optimizer", "both")
ACTIVATION_OFFLOAD: tuple[Offload, ...] = ("activations", "both")


class LayoutConstraints(Schema):
    """What the user pins of a stage's layout; whatever is left out is searched."""

    pipeline_parallel: PositiveInt | None = None
    """Pipeline stages held by different ranks."""
    virtual_stages: PositiveInt | None = None
    """Model chunks per pipeline rank."""
    data_parallel_replicate: PositiveInt | None = None
    """Replicas of the sharded model (hybrid sharding)."""
    data_parallel_shard: PositiveInt | None = None
    """Ranks that FSDP shards parameters over."""
    context_parallel: PositiveInt | None = None
    """Ranks that share one sequence."""
    tensor_parallel: PositiveInt | None = None
    """Ranks that share each matrix, with sequence parallel around them."""
    expert_parallel: PositiveInt | None = None
    """Ranks that the routed experts are spread over."""
    zero: Zero | None = None
    """3 frees gathered parameters after forward, 2 keeps them until backward; 1 keeps parameters and the
    step's gradients whole and reduces once, after the last micro-batch."""
    schedule: Schedule | None = None
    """Pipeline schedule."""
    recompute: Recompute | None = None
    """What is recomputed in backward: nothing, the cheap operators, or whole layers."""
    micro_batch: PositiveInt | None = None
    """Sequences in one micro-batch of one data-parallel rank."""
    delta_context: DeltaContext | None = None
    """How context parallel crosses delta attention: passing states, or exchanging heads."""
    offload: Offload | None = None
    """What is kept in host memory instead of the device's. Left out, that is tried only where nothing fits
    without it, as every byte takes time on the way."""


class Layout(Schema):
    """One complete layout of a stage."""

    pipeline_parallel: PositiveInt = 1
    virtual_stages: PositiveInt = 1
    data_parallel_replicate: PositiveInt = 1
    data_parallel_shard: PositiveInt = 1
    context_parallel: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = 1
    zero: Zero = 3
    schedule: Schedule = "none"
    recompute: Recompute = "none"
    micro_batch: PositiveInt = 1
    """Sequences in one micro-batch of one data-parallel rank."""
    micro_batches: PositiveInt = 1
    """Micro-batches each data-parallel rank runs per optimizer step."""
    delta_context: DeltaContext = "state"
    """How context parallel crosses delta attention: passing states, or exchanging heads."""
    offload: Offload = "none"
    """What is kept in host memory instead of the device's."""
    stage_layers: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    """First (inclusive) and last (exclusive) layer of each model chunk, in model order."""

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer state is kept in host memory."""
        return self.offload in OPTIMIZER_OFFLOAD

    @property
    def offloads_activations(self) -> bool:
        """Whether what layers keep for backward is kept in host memory."""
        return self.offload in ACTIVATION_OFFLOAD

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        return self.data_parallel_replicate * self.data_parallel_shard

    @property
    def world_size(self) -> int:
        """Devices the layout uses."""
        return self.pipeline_parallel * self.data_parallel * self.context_parallel * self.tensor_parallel

    def rank_of(self, chunk: int) -> int:
        """Pipeline rank that holds a model chunk."""
        place = chunk % (2 * self.pipeline_parallel if self.schedule in V_SHAPED else self.pipeline_parallel)
        return min(place, 2 * self.pipeline_parallel - 1 - place)

    def chunks_on(self, rank: int) -> tuple[int, ...]:
        """Model chunks that a pipeline rank holds, in model order."""
        chunks = range(self.pipeline_parallel * self.virtual_stages)
        return tuple(chunk for chunk in chunks if self.rank_of(chunk) == rank)

    @property
    def expert_shard(self) -> int:
        """Ranks that FSDP shards each expert over."""
        region = self.data_parallel_shard * self.context_parallel * self.tensor_parallel
        return region // self.expert_parallel
