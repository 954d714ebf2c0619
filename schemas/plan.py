"""The plan: everything the compiler decided, and the only thing that passes to the runtime.

JSON, versioned, canonical; `hash` covers all the rest. Sizes are bytes, times are seconds, of one
device unless a field says otherwise.
"""

import hashlib
import json
from typing import Literal, Self

from shipway.schemas.base import Schema
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.layout import Layout

PLAN_FORMAT = 1
Verdict = Literal["fits", "tight", "does not fit"]


class BlockParameters(Schema):
    """Parameters of one kind of block, over the whole model."""

    block: str
    """Block, such as `delta attention` or `routed experts`."""
    count: int
    """Blocks of this kind."""
    total: int
    """Parameters of all of them."""
    active: int
    """Of these, parameters that one token passes."""


class Parameters(Schema):
    """Parameter counts in the three conventions that publishers use."""

    total: int
    """All parameters, balancing biases and vision tower included."""
    active: int
    """What one text token passes, without the input embedding, head included."""
    active_with_embedding: int
    """`active` and the input embedding table."""
    active_without_head: int
    """`active` less the head."""
    blocks: tuple[BlockParameters, ...]
    """By block."""


class MemoryItem(Schema):
    """One line of the memory budget."""

    name: str
    """What holds the memory."""
    category: Literal[
        "parameters", "gradients", "optimizer", "activations", "communication", "scratch", "outside"
    ]
    bytes: int
    """Bytes held at the moment of the peak."""
    note: str = ""
    """Assumption behind the figure."""


class MemoryBudget(Schema):
    """Peak memory of one kind of rank in steady state."""

    rank: str
    """Which ranks: `pipeline rank 0`, ..."""
    pipeline_rank: int
    items: tuple[MemoryItem, ...]
    """Largest first, at the moment of the peak; they add up to `peak_bytes`."""
    allocated_bytes: int
    """Tensors alive at the peak, as torch.cuda.max_memory_allocated reports."""
    reserved_bytes: int
    """Held by the caching allocator, as torch.cuda.max_memory_reserved reports."""
    outside_bytes: int
    """Held outside the allocator: context, libraries, communicators."""
    peak_bytes: int
    """reserved_bytes + outside_bytes: what the device must have."""
    upper_bytes: int
    """Upper bound of `peak_bytes` under the stated assumptions."""
    capacity_bytes: int
    """What the device has."""
    moment: str
    """When the peak occurs."""
    verdict: Verdict


class HostMemory(Schema):
    """Memory of the fullest node's host, where a layout keeps things there."""

    items: tuple[MemoryItem, ...]
    """Largest first; they add up to `node_bytes`."""
    node_bytes: int
    capacity_bytes: int
    """What ranks can have of the node's memory."""


class StageMemory(Schema):
    """Memory of a training stage: the worst rank's budget first, then all kinds of rank."""

    peak_bytes: int
    """Peak of the worst rank."""
    items: tuple[MemoryItem, ...]
    """Items of the worst rank."""
    verdict: Verdict
    """Verdict of the worst rank."""
    ranks: tuple[MemoryBudget, ...]
    """One per kind of rank, in pipeline order."""
    host: HostMemory | None = None
    """None where the layout offloads nothing."""

    def of(self, pipeline_rank: int) -> MemoryBudget:
        """The budget of a rank's kind; the worst one's when there is no such kind."""
        mine = [budget for budget in self.ranks if budget.pipeline_rank == pipeline_rank]
        return max(mine or self.ranks, key=lambda budget: budget.allocated_bytes)


class Collective(Schema):
    """One line of the communication ledger, for the busiest rank and one optimizer step."""

    name: str
    """What is sent."""
    axis: str
    """Mesh axis: pp, dp_replicate, dp_shard (with cp: what FSDP shards over), cp, tp, ep, expert_shard, data
    (dp_shard alone: ranks that read different rows)."""
    collective: Literal[
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_receive", "broadcast"
    ]
    group_size: int
    """Ranks in the group."""
    stride: int = 1
    """Distance between neighbours in the group, in ranks."""
    bytes: int
    """Size of the full tensor in one call."""
    count: int
    """Calls per optimizer step."""
    algorithm: str
    """ring, tree, pairwise, ..."""
    link: str
    """Narrowest link on the path: scale-up or network."""
    seconds: float
    """Time of all calls."""
    exposed_seconds: float
    """Of these, seconds not hidden under compute."""
    note: str = ""
    """What hides it, or why nothing does."""


class TimeItem(Schema):
    """One line of the time budget: seconds on the critical path of one optimizer step."""

    name: str
    seconds: float
    note: str = ""
    """Assumption behind the figure."""


class Alternative(Schema):
    """A layout that lost, and why."""

    layout: Layout
    step_seconds: float
    peak_bytes: int
    reason: str


class StagePlan(Schema):
    """One training stage, planned."""

    name: str
    context_tokens: int
    tokens: int
    steps: int
    sequences_per_step: int
    """Sequences of `context_tokens` in one optimizer step, over the whole cluster."""
    layout: Layout
    devices_used: int
    memory: StageMemory
    communication: tuple[Collective, ...]
    time: tuple[TimeItem, ...]
    """Adds up to `step_seconds`."""
    step_seconds: float
    tokens_per_second: float
    """Over the whole cluster."""
    model_flops_per_token: float
    """Forward and backward, causal attention, without recomputation."""
    mfu: float
    """Model FLOPs utilisation, of the devices' bf16 peak (fp32 when computing in fp32; bf16 with fp8 too)."""
    hfu: float
    """Hardware FLOPs utilisation: as mfu, with recomputation."""
    hours: float
    device_hours: float
    cost: float
    """US dollars."""
    candidates: int
    """Legal layouts that were evaluated."""
    alternatives: tuple[Alternative, ...]
    """Runners-up, best first."""


class StageChange(Schema):
    """From one stage to the next: state saved in one layout and loaded in another, through storage."""

    before: str
    """Name of the stage that ends."""
    after: str
    """Name of the stage that begins."""
    state_bytes: int
    """Weights and optimizer state, written once."""
    read_bytes: int
    """What all ranks of the next stage read of it together: DCP reads every saved shard whole that overlaps
    the wanted one, and replicas read each for themselves."""
    write_seconds: float
    read_seconds: float
    """Checksums and verification, each of the whole state, and loading."""
    restart_seconds: float
    """Assumed: processes, communicators, model and first launches."""
    new_job: bool
    """Whether the next stage runs on another number of devices, and so in a job of its own."""
    seconds: float
    cost: float
    """US dollars of the devices that wait."""


class Totals(Schema):
    """The whole programme, changes between stages included."""

    tokens: int
    hours: float
    device_hours: float
    cost: float


class Plan(Schema):
    """A frozen plan."""

    format: Literal[1] = 1
    shipway: str
    """Version of Shipway that planned."""
    name: str
    blueprint: Blueprint
    """The blueprint, composed, resolved and normalised."""
    blueprint_hash: str
    """Hash of `blueprint`, to tell whether it has changed since."""
    origin: tuple[str, ...] = ()
    """The blueprint's name or path and the overrides, as the user typed them."""
    folder: str = ""
    """Folder, absolute, that relative paths of `blueprint.training.data` start from; empty without any."""
    fp8_linears: tuple[str, ...] = ()
    """Linear modules of the model, by name, whose products run in fp8."""
    calibration: str
    """Name of the efficiency figures behind the times."""
    parameters: Parameters
    stages: tuple[StagePlan, ...]
    changes: tuple[StageChange, ...] = ()
    """Between successive stages, in order."""
    totals: Totals
    warnings: tuple[str, ...] = ()
    hash: str = ""

    def sealed(self) -> Self:
        """The same plan with `hash` set from all the rest."""
        return self.model_copy(update={"hash": content_hash(self, without="hash")})


def canonical_json(value: Schema) -> str:
    """Canonical text of a value: sorted keys, two-space indent, final newline."""
    return json.dumps(value.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def content_hash(value: Schema, without: str | None = None) -> str:
    """SHA-256 over the canonical text of `value`, less the field `without`."""
    data = value.model_dump(mode="json", exclude={without} if without else None)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
