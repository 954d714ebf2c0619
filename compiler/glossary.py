"""Terms of a plan, for `shipway explain`: what each line of a budget means and what moves it."""

from __future__ import annotations

from shipway.compiler.frozen import frozen


@frozen
class Term:
    """One term."""

    name: str
    meaning: str
    moves: str = ""
    """What makes it smaller or larger."""
    aliases: tuple[str, ...] = ()
    """Other words that plans print for it."""


_TERMS = (
    # Memory, by category
    Term(
        "parameters",
        "Weights that a rank holds: its own shard, and copies gathered for the layers at work.",
        "Shard over more ranks (data_parallel_shard, tensor, pipeline, expert parallel); zero 3 frees "
        "gathered weights after forward.",
    ),
    Term("gradients", "Gradients of the rank's shard, in training.precision.gradients.", "As parameters."),
    Term(
        "optimizer",
        "Master weights and moments: Muon keeps one moment a matrix, AdamW two a weight.",
        "Shard further; training.precision.optimizer: bf16 halves the moments.",
    ),
    Term(
        "activations",
        "Tensors kept from forward to backward, for every micro-batch in flight.",
        "Recomputation, a smaller micro-batch, tensor or context parallel; a deeper pipeline keeps more "
        "micro-batches in flight on its first ranks.",
    ),
    Term(
        "communication",
        "Buffers of collectives: gathered parameters, reduce-scatter, all-to-all, NCCL's channels.",
        "Fewer or smaller groups.",
    ),
    Term(
        "scratch", "Temporaries of the largest operator or of the optimizer's step.", "A smaller micro-batch."
    ),
    Term(
        "outside",
        "Memory that torch's allocator does not see: CUDA context, library workspaces, communicators.",
        "The device's context_bytes; fewer mesh axes.",
        aliases=("outside the allocator", "outside_bytes"),
    ),
    Term(
        "peak",
        "What the device must have: reserved and outside memory at the worst moment of a step.",
        aliases=("peak_bytes", "needs"),
    ),
    Term(
        "allocated",
        "Tensors alive at the peak, as torch.cuda.max_memory_allocated reports.",
        aliases=("allocated_bytes",),
    ),
    Term(
        "reserved",
        "What the caching allocator holds: of each stream the most that it ever needed, and rounding.",
        aliases=("reserved_bytes",),
    ),
    Term(
        "verdict",
        "fits: the upper bound is within the device; tight: only the point estimate is; does not fit: "
        "neither is.",
        aliases=("fits", "tight", "does not fit"),
    ),
    # Time
    Term(
        "step time",
        "Seconds of one optimizer step on the slowest rank: compute, exposed communication, bubble, "
        "optimizer, launch overhead.",
    ),
    Term(
        "bubble",
        "Time in which a pipeline rank waits for others.",
        "More micro-batches per step, virtual stages, a better balanced cut.",
        aliases=("pipeline bubble and transfers",),
    ),
    Term(
        "exposed",
        "Communication that nothing hides.",
        "A layout whose groups stay inside the scale-up links; larger micro-batches.",
        aliases=("exposed communication",),
    ),
    Term("mfu", "Model FLOPs utilisation: FLOPs that the model needs, over what the devices' peak allows."),
    Term("hfu", "Hardware FLOPs utilisation: as mfu, with recomputed work counted."),
    Term("tokens per second", "Tokens of one step over step time, over the whole cluster."),
    Term("imbalance", "Largest over mean load of the ranks that hold experts.", aliases=("expert load",)),
    # Layout
    Term(
        "pp",
        "Pipeline parallel: layers are divided over ranks, micro-batches pass through them.",
        aliases=("pipeline parallel",),
    ),
    Term(
        "dp_replicate",
        "Replicated data parallel: whole copies of the sharded model read other samples.",
        aliases=("DP", "replicas", "replicated data parallel"),
    ),
    Term(
        "dp_shard",
        "Sharded data parallel (FSDP): ranks read other samples and share parameters.",
        aliases=("FSDP", "sharded data parallel"),
    ),
    Term("cp", "Context parallel: ranks share one sequence.", aliases=("context parallel",)),
    Term(
        "tp",
        "Tensor parallel: ranks share each matrix, with sequence parallel around them.",
        aliases=("tensor parallel", "sequence parallel"),
    ),
    Term(
        "ep",
        "Expert parallel: routed experts are spread over ranks of dp_shard x cp x tp; tokens travel to "
        "them by all-to-all.",
        aliases=("expert parallel",),
    ),
    Term("expert_shard", "What is left of dp_shard x cp x tp after ep: it shards each expert."),
    Term(
        "micro-batch",
        "Sequences that one data-parallel rank takes through forward and backward at once.",
        aliases=("micro-batches",),
    ),
    Term(
        "recompute",
        "What backward computes again rather than keep: nothing, cheap operators, whole layers.",
        aliases=("recomputation", "none", "selective", "full"),
    ),
    Term(
        "zero",
        "2 keeps gathered parameters from forward to backward, 3 frees and gathers them again; 1 keeps "
        "parameters and gradients whole over a step: one gather and one reduction, as pipelines do.",
        aliases=("ZeRO", "ZeRO 1", "ZeRO 2", "ZeRO 3"),
    ),
    # Parameters
    Term("total", "All parameters, balancing biases and vision tower included."),
    Term("active", "Parameters that one token passes, head included, input embedding left out."),
)


def terms() -> dict[str, Term]:
    """All terms by name."""
    from shipway.compiler.glossary_collectives import COLLECTIVE_TERMS
    from shipway.compiler.glossary_offload import OFFLOAD_TERMS
    from shipway.compiler.glossary_tables import TABLE_TERMS

    return {term.name: term for term in (*_TERMS, *TABLE_TERMS, *COLLECTIVE_TERMS, *OFFLOAD_TERMS)}
