"""Runs that others published, as blueprints: model, devices, layout, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shipway.compiler.assemble import choose, flops_per_token
from shipway.compiler.layouts import from_layout
from shipway.compiler.ledger import Chosen
from shipway.compiler.problem import Problem
from shipway.schemas.layout import Layout
from tests.compiler.planner.planning import blueprint, cluster, problem_of, rebuilt

H100 = "h100_8"
NETWORK = {"nic_bandwidth": 50e9}


def dense(layers: int, width: int, heads: int, kv_heads: int, inner: int, vocabulary: int) -> dict[str, Any]:
    """A dense decoder with grouped-query attention and a gated unit."""
    return {
        "model.layers": layers,
        "model.width": width,
        "model.vocabulary": vocabulary,
        "model.attention.mix": ["grouped"] * layers,
        "model.attention.grouped.heads": heads,
        "model.attention.grouped.kv_heads": kv_heads,
        "model.attention.grouped.head_width": width // heads,
        "model.feed_forward.mix": ["dense"] * layers,
        "model.feed_forward.dense_inner_width": inner,
    }


@dataclass(frozen=True)
class Run:
    """One published run."""

    name: str
    model: str
    """Blueprint that has the model."""
    device: str
    """Cluster blueprint that has the device."""
    devices: int
    context: int
    layout: dict[str, Any]
    step_seconds: float | None = None
    memory_gib: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    memory_device_gib: float | None = None
    """What the device of the run had, where it differs from ours."""
    extra_gib: float = 0.0
    """What that engine holds and ours does not."""
    products_repeated: float = 0.0
    """Share of the forward's matrix products that its recomputation repeats and ours does not."""
    differs: str = ""
    """Where the run is not what ours would be."""

    def problem(self) -> Problem:
        """The run as a stage to plan."""
        layout = Layout(**self.layout)
        batch = layout.data_parallel * layout.micro_batch * layout.micro_batches * self.context
        device = blueprint(self.model, f"cluster={self.device}").cluster.device
        memory = self.memory_device_gib or device.memory / 2**30
        changes = cluster(self.devices, memory_gib=memory) | {
            "training.stages.0.context": self.context,
            "training.stages.0.global_batch": batch,
            "training.stages.0.layout": "auto",
            "training.optimizer": {"kind": "adamw"},
        }
        made = blueprint(self.model, f"cluster={self.device}")
        return problem_of(rebuilt(made, changes | self.changes))

    def assessed(self) -> Chosen:
        """Our figures for the layout that ran."""
        return choose(self.problem(), from_layout(Layout(**self.layout)))

    def flops_per_token(self) -> float:
        """Model FLOPs of one token."""
        return flops_per_token(self.problem(), 0)[0]


def step_of(tokens_per_second_per_device: float, context: int, layout: dict[str, Any]) -> float:
    """Step time from tokens per second and device."""
    made = Layout(**layout)
    tokens = made.data_parallel * made.micro_batch * made.micro_batches * context
    return tokens / (tokens_per_second_per_device * made.world_size)


def piped(pp: int, virtual: int, **rest: Any) -> dict[str, Any]:
    """A layout with a pipeline."""
    return {
        "pipeline_parallel": pp,
        "virtual_stages": virtual,
        "schedule": "1f1b" if virtual == 1 else "interleaved_1f1b",
        "zero": 1,
        **rest,
    }


TITAN_8 = {"data_parallel_shard": 8, "micro_batch": 2, "recompute": "selective"}
TITAN_128 = {"data_parallel_shard": 128, "micro_batch": 2, "recompute": "selective"}
QWEN = {
    "data_parallel_shard": 8,
    "expert_parallel": 8,
    "micro_batch": 4,
    "micro_batches": 16,
    "recompute": "full",
}
DEEPSEEK = piped(4, 8, data_parallel_shard=64, expert_parallel=64, micro_batches=8, recompute="full")
KIMI = piped(8, 1, data_parallel_shard=32, expert_parallel=32, micro_batches=16, recompute="full")

TITAN_DIFFERS = (
    "its H100s have HBM2e and 500 W; it makes whole logits (fp32 and bf16, and a gradient); its selective"
    " recomputation repeats every second matrix product"
)
LOGITS_GIB = 2 * 8192 * 128256 * (4 + 2 + 2) / 2**30
LIMITED = {
    "cluster.device.peak.bf16": 0.8 * 989e12,
    "cluster.device.memory_bandwidth": 2.4e12,
}
"""torchtitan's H100s: 96 GB of HBM2e and 500 W, whose clock is taken to sustain 0.8 of the usual peak."""
HALF = {"training.precision": {"compute": "bf16", "master": "bf16", "gradients": "bf16", "optimizer": "bf16"}}

TITAN: dict[str, Any] = {
    "memory_device_gib": 94.5,
    "changes": LIMITED,
    "extra_gib": LOGITS_GIB,
    "products_repeated": 0.5,
    "differs": TITAN_DIFFERS,
}

TORCHTITAN = (
    Run("torchtitan, Llama-3.1-8B, 8 x H100, eager", "llama31_8b", H100, 8, 8192, TITAN_8,
        step_of(5762, 8192, TITAN_8), 82.4, **TITAN),
    Run("torchtitan, Llama-3.1-8B, 128 x H100, eager", "llama31_8b", H100, 128, 8192, TITAN_128,
        step_of(5605, 8192, TITAN_128), 67.0, **TITAN),
)  # fmt: skip
DEEPEP = (
    "DeepEP sends a token once per node where NCCL's all-to-all sends it once per expert; batch,"
    " recomputation and number formats of the states are not published (bf16 states assumed)"
)
AUTOMODEL = (
    Run("NeMo AutoModel, Qwen3-30B-A3B, 8 x H100, EP 8", "qwen3_30b_a3b", H100, 8, 4096, QWEN,
        step_of(12040, 4096, QWEN), changes=HALF, differs=DEEPEP),
    Run("NeMo AutoModel, DeepSeek-V3, 256 x H100, PP 4 x EP 64", "deepseek_v3", H100, 256, 4096, DEEPSEEK,
        step_of(1002, 4096, DEEPSEEK), changes=HALF, differs=DEEPEP),
    Run("NeMo AutoModel, Kimi K2, 256 x H100, PP 8 x EP 32", "kimi_k2", H100, 256, 4096, KIMI,
        step_of(924, 4096, KIMI), changes=HALF, differs=DEEPEP),
)  # fmt: skip

GPT3 = dense(96, 12288, 96, 96, 4 * 12288 * 2 // 3, 51200)


def vtrain(tp: int, dp: int, pp: int, micro_batch: int, seconds: float) -> Run:
    """A 175B run on 512 A100s, sequence 2048, batch 1536, full recomputation."""
    layout = piped(
        pp,
        1,
        tensor_parallel=tp,
        data_parallel_replicate=dp,
        micro_batch=micro_batch,
        micro_batches=1536 // dp // micro_batch,
        recompute="full",
    )
    name = f"vTrain, 175B, 512 x A100, TP {tp} DP {dp} PP {pp}, micro-batch {micro_batch}"
    return Run(name, "llama31_8b", "a100_16x8", 512, 2048, layout, seconds, changes=GPT3)


VTRAIN = (
    vtrain(4, 4, 32, 2, 53.91),
    vtrain(4, 8, 16, 2, 54.26),
    vtrain(8, 8, 8, 2, 55.11),
    vtrain(2, 8, 32, 3, 64.30),
)


LLAMA70 = dense(12, 8192, 64, 8, 28672, 128256)


def simumax(
    name: str, model: str, layout: dict[str, Any], milliseconds: float, gib: float, **changes: Any
) -> Run:
    """A run on 8 B200s with Megatron's distributed optimizer, which is ZeRO 1, sequence 4096."""
    return Run(name, model, "b200_8", 8, 4096, layout, milliseconds / 1e3, gib, changes=changes)


def deepseek_cut(micro_batches: int, milliseconds: float) -> Run:
    """DeepSeek-V3 cut to four layers, the first dense, with EP 8."""
    layout = {"data_parallel_shard": 8, "expert_parallel": 8, "micro_batches": micro_batches, "zero": 2}
    changes = {
        "model.layers": 4,
        "model.attention.mix": ["latent"] * 4,
        "model.feed_forward.mix": ["dense", *["experts"] * 3],
        "model.multi_token_prediction": None,
    }
    name = f"SimuMax, DeepSeek-V3 of 4 layers, EP 8, {micro_batches} micro-batches"
    differs = "Megatron keeps weights and fp32 gradients whole, where ours shards, gathers and reduces them"
    seconds = milliseconds / 1e3
    return Run(
        name, "deepseek_v3", "b200_8", 8, 4096, layout, seconds, 104.3, changes=changes, differs=differs
    )


SIMUMAX = (
    simumax("SimuMax, Llama-3-70B of 12 layers, TP 2 x DP 4", "llama31_8b",
            {"tensor_parallel": 2, "data_parallel_shard": 4, "micro_batches": 4, "zero": 1},
            725.5, 60.68, **LLAMA70),
    simumax("SimuMax, Llama-3-70B of 12 layers, TP 4 x DP 2", "llama31_8b",
            {"tensor_parallel": 4, "data_parallel_shard": 2, "micro_batches": 4, "zero": 1},
            409.8, 39.07, **LLAMA70),
    deepseek_cut(4, 603.2),
    deepseek_cut(32, 4141.0),
)  # fmt: skip
