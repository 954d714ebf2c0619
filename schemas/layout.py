"""How one training stage is spread over the cluster: constraints asked for, and the layout chosen.

Mesh axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. Expert parallel (ep) folds the
innermost part of dp_shard x cp x tp; what is left of that product shards the experts (expert FSDP).
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from shipway.schemas.base import Schema

Schedule = Literal["none", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]


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
    zero: Literal[2, 3] | None = None
    """3 frees gathered parameters after forward, 2 keeps them until backward."""
    schedule: Schedule | None = None
    """Pipeline schedule."""
    recompute: Recompute | None = None
    """What is recomputed in backward: nothing, the cheap operators, or whole layers."""
    micro_batch: PositiveInt | None = None
    """Sequences in one micro-batch of one data-parallel rank."""


class Layout(Schema):
    """One complete layout of a stage."""

    pipeline_parallel: PositiveInt = 1
    virtual_stages: PositiveInt = 1
    data_parallel_replicate: PositiveInt = 1
    data_parallel_shard: PositiveInt = 1
    context_parallel: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = 1
    zero: Literal[2, 3] = 3
    schedule: Schedule = "none"
    recompute: Recompute = "none"
    micro_batch: PositiveInt = 1
    """Sequences in one micro-batch of one data-parallel rank."""
    micro_batches: PositiveInt = 1
    """Micro-batches each data-parallel rank runs per optimizer step."""
    stage_layers: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    """First (inclusive) and last (exclusive) layer of each model chunk, in model order."""

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        return self.data_parallel_replicate * self.data_parallel_shard

    @property
    def world_size(self) -> int:
        """Devices the layout uses."""
        return self.pipeline_parallel * self.data_parallel * self.context_parallel * self.tensor_parallel

    @property
    def expert_shard(self) -> int:
        """Ranks that FSDP shards each expert over."""
        region = self.data_parallel_shard * self.context_parallel * self.tensor_parallel
        return region // self.expert_parallel
