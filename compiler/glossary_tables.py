"""Terms of a plan that stand in its tables: items of memory and time, collectives, blocks of the model."""

from __future__ import annotations

from shipway.compiler.glossary import Term

_SHARDED = "Shard over more ranks: data_parallel_shard, tensor, pipeline or expert parallel."
TABLE_TERMS = (
    # Judging a plan
    Term(
        "parity",
        "Whether a layout trains to the same losses as one device does. `make parity` trains a small model "
        "under every layout and under one process, and prints both; a plan warns of what is not proven.",
    ),
    Term(
        "upper_bytes",
        "The most that the device may need: the peak with the error of the activations' estimate, more "
        "fragmentation and more memory outside the allocator. A plan `fits` only when this is on the device.",
        aliases=("at most", "upper bound"),
    ),
    Term("capacity", "Memory of one device that a process can have.", aliases=("capacity_bytes", "has")),
    Term(
        "estimate",
        "A figure from assumed or borrowed efficiencies instead of measured ones.",
        "`shipway calibrate` measures your devices; `shipway plan --calibration FILE` uses that.",
        aliases=("calibration", "times from"),
    ),
    Term("runner-up", "A layout that the search ranked behind the chosen one.", aliases=("runners-up",)),
    Term(
        "device-hours",
        "Hours times the devices that a stage uses; idle ones of the cluster are left out.",
        aliases=("device_hours", "cost", "idle"),
    ),
    # Layout
    Term(
        "vp",
        "Virtual stages: each pipeline rank holds several separate chunks of the layers, which shortens the "
        "pipeline's fill and drain.",
        aliases=("virtual stages", "chunks"),
    ),
    Term("1f1b", "Pipeline schedule: once filled, each rank alternates one forward and one backward."),
    Term("interleaved_1f1b", "1f1b over the several chunks that each rank holds (virtual stages)."),
    Term(
        "zbv",
        "Zero-bubble pipeline schedule: two chunks a rank, down the ranks and back up, so that rank 0 has "
        "embedding and head; weights' gradients wait and fill what would be bubbles. 1f1b's memory, on "
        "every rank. With recomputation backward stays whole.",
        aliases=("zero bubble", "weight gradients"),
    ),
    Term(
        "dualpipev",
        "Pipeline schedule of two chunks a rank, placed as zbv has them: whole backwards once filled, in "
        "two parts only at the ends. Needs twice as many micro-batches as ranks.",
        aliases=("DualPipeV", "DualPipe"),
    ),
    Term("muon", "Optimizer of the matrices: momentum, made orthogonal by Newton-Schulz steps."),
    Term("adamw", "Optimizer of all that is no matrix of a layer: two moments a weight."),
    # Items of memory
    Term(
        "master weights",
        "The rank's shard of the weights in training.precision.master, which the optimizer updates.",
        _SHARDED,
    ),
    Term(
        "gathered parameters",
        "Whole weights of layers at work, which FSDP gathers from the ranks' shards.",
        "ZeRO 3 keeps two layers, ZeRO 2 and pipelines keep all; tensor or pipeline parallel leaves fewer.",
    ),
    Term(
        "optimizer state",
        "Moments of the rank's shard: one a weight for Muon, two for AdamW.",
        "training.precision.optimizer: bf16 halves it; sharding over more ranks; offload: optimizer.",
    ),
    Term(
        "moving average of weights",
        "Their exponential moving average in fp32 (training.ema), sharded as the weights are.",
        "training.ema=null; sharding over more ranks.",
    ),
    Term(
        "gradients of matrices' outputs",
        "What zbv and dualpipev keep between the two parts of backward, for the weights' gradients.",
        "schedule: 1f1b or interleaved_1f1b; recomputation, with which backward stays whole.",
    ),
    Term(
        "routers' counters",
        "Loads of the experts, and the margins that quantile balancing takes its biases from.",
        "balancing.bins; pipeline ranks.",
    ),
    Term("gradients, sharded", "Summed gradients of the rank's own shard of the weights.", _SHARDED),
    Term(
        "gradients, whole until the last micro-batch",
        "Under a pipeline, gradients of all weights of the rank, reduced once after the last backward.",
        "More pipeline ranks, tensor or expert parallel; sharding does not lower it.",
    ),
    Term(
        "kept activations",
        "What forward keeps for backward, for all micro-batches in flight on the rank.",
        "Recomputation, a smaller micro-batch, tensor or context parallel, fewer pipeline ranks.",
    ),
    Term(
        "temporaries of one layer",
        "What one layer's backward adds to what is kept: what is computed again, gradients and scratch, "
        "operation by operation.",
        "A smaller micro-batch, tensor or context parallel.",
    ),
    Term("cuBLAS workspaces", "Room that products work in, for each of the threads that run them."),
    Term(
        "optimizer temporaries",
        "What the optimizer's step needs for a moment: the matrix being made orthogonal, and its products.",
    ),
    Term("gradient reduction buffers", "Gradients of one layer on their way through reduce-scatter."),
    Term(
        "pipeline receive buffers",
        "Where hidden states and their gradients arrive from neighbouring pipeline ranks.",
        "Fewer micro-batches a step: torch allocates one buffer for each.",
    ),
    Term(
        "kept by the allocator for other moments",
        "Free pages of torch's pools: what is freed serves its own stream alone, and sums of gradients and "
        "gathered parameters have streams of their own. A full device takes them back, which costs time.",
    ),
    Term(
        "allocator rounding and fragmentation",
        "Partly used pages of torch's caching allocator.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which the launch scripts set.",
        aliases=("allocator rounding", "fragmentation"),
    ),
    Term("device context", "What the driver takes in each process before the first tensor."),
    Term(
        "libraries and kernels' modules", "Workspaces of cuBLAS and the like, and the loaded kernels' code."
    ),
    Term(
        "communicators",
        "NCCL's buffers: each group of ranks has a communicator of its own.",
        "Fewer mesh axes above one.",
        aliases=("communicator",),
    ),
    # Items of time
    Term("matrix products", "Dense products: projections, feed-forward, head.", "Larger micro-batches."),
    Term("expert products", "Grouped products of the routed experts, on the rank with most tokens."),
    Term(
        "memory-bound work",
        "Norms, activations, rotary and the like, which wait for memory and not for arithmetic.",
    ),
    Term(
        "rounding to fp8",
        "Operands of fp8 products, and of their gradients, on their way from bf16: the largest magnitude of"
        " each row is found, the row is scaled by it and rounded, six times for every projection.",
        "A larger training.precision.fp8_smallest; training.compile other than none.",
    ),
    Term("expert all-to-all", "Tokens on their way to their experts and back.", "A smaller expert_parallel."),
    Term("tensor-parallel collectives", "Gathers and reductions around each block that ranks share."),
    Term("context-parallel collectives", "What ranks exchange that share one sequence."),
    Term(
        "parameter gather and gradient reduction, exposed",
        "The part of FSDP's collectives that no computation hides.",
        "Larger micro-batches, or sharding inside the scale-up links.",
    ),
    Term(
        "copies of parameters and gradients for FSDP",
        "What FSDP itself reads and writes around its collectives: casts, gathered parameters copied in and "
        "out, gradients laid one after the other and added up.",
        "Larger micro-batches; zero 1 or 2, which gather less often.",
    ),
    Term(
        "waiting for the host to issue work", "Time in which devices are done before the next kernel comes."
    ),
    Term("checkpoints, spread over steps", "Time of saving, over the steps between two checkpoints."),
    Term("attention", "The softmax attention's core, which grows with the square of the context."),
    # Collectives and where they run
    Term("all-to-all", "Collective in which each rank sends a different part to each other rank."),
    Term("all-gather", "Collective after which each rank holds the parts of all."),
    Term("reduce-scatter", "Collective that sums the ranks' tensors and leaves each rank a part of the sum."),
    Term("all-reduce", "Collective that sums the ranks' tensors and leaves each rank the whole sum."),
    Term("send-receive", "A message from one rank to one other."),
    Term(
        "scale-up", "Links inside a node or a rack, such as NVLink: the fast ones.", aliases=("link domain",)
    ),
    Term("network", "Links between nodes, such as InfiniBand or RoCE: slower than scale-up."),
    Term("ring", "Each rank passes parts to its neighbour, so that all links work at once."),
    Term("ring or tree", "A ring, or a tree where latency counts more than bandwidth.", aliases=("tree",)),
    Term("pairwise", "Each rank exchanges directly with each other rank."),
    Term("point to point", "One rank sends to one other."),
    # Blocks of the model
    Term(
        "delta attention",
        "Linear attention: a state of fixed size that each token corrects by the delta rule.",
    ),
    Term("latent attention", "Softmax attention whose keys and values are made from one small latent (MLA)."),
    Term("grouped attention", "Softmax attention in which several query heads share a key-value head (GQA)."),
    Term("routed experts", "Feed-forward units of which a router picks a few for each token."),
    Term("shared experts", "Feed-forward units that every token passes, beside its routed ones."),
    Term("router", "Scores the experts for each token, and keeps their loads even."),
    Term("latent projections", "Projections into and out of the narrower width that routed experts work in."),
    Term("dense feed-forward", "Feed-forward of a layer without experts."),
    Term("attention residuals", "Each layer reads a learned mixture of earlier layers' outputs."),
    Term("norms", "RMS norms."),
    Term("embedding", "Table from tokens to vectors."),
    Term("head", "Projection from vectors to the vocabulary's logits, and the loss."),
    Term("vision tower", "Encoder of images; text stages hold its parameters and do not run it."),
    Term("projector", "Maps the vision tower's vectors to the model's width."),
    Term(
        "multi-token prediction",
        "Further modules that predict tokens after the next.",
        aliases=("prediction",),
    ),
)
