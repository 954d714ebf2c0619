"""Terms of what a layout keeps in host memory."""

from __future__ import annotations

from shipway.compiler.glossary import Term

_MORE_NODES = "More nodes to share it, or more host memory in each (cluster.host_memory)."
OFFLOAD_TERMS = (
    Term(
        "offload",
        "What waits in host memory instead of the device's: optimizer state (the moments, which one update a "
        "step reads), what layers keep for backward under full recomputation (activations), or both. Left "
        "out of a layout it is tried only where nothing fits without, as every byte takes time on its way. "
        "Master weights stay: FSDP gathers from them in every micro-batch.",
        aliases=("cpu offload", "host memory"),
    ),
    Term(
        "optimizer state, offloaded",
        "Moments in pinned host memory.",
        f"{_MORE_NODES} training.precision.optimizer: bf16 halves moments.",
    ),
    Term(
        "kept activations, offloaded",
        "Inputs of layers in pinned host memory, for all micro-batches in flight; torch's allocator of "
        "pinned memory rounds each up to a power of two bytes.",
        _MORE_NODES,
    ),
    Term(
        "copy of the state that a checkpoint writes",
        "Weights and optimizer state, copied so that training may go on while they are written.",
        _MORE_NODES,
    ),
    Term("processes", "What each rank's process takes of host memory, by assumption."),
    Term(
        "slices of offloaded optimizer state",
        "Buffers on the device that optimizer state passes through: one slice is updated while the next "
        "arrives, two for each moment.",
    ),
    Term(
        "offloaded activations under way",
        "Inputs of layers that have not left the device yet, or are back before their layer needs them.",
    ),
    Term(
        "optimizer state from and to the host",
        "Copies of offloaded optimizer state that the update does not hide: both ways at once, once a step.",
        "offload: none; training.precision.optimizer: bf16; sharding over more ranks.",
    ),
    Term(
        "activations to and from the host",
        "Where the copy of a layer's input takes longer than the layer.",
        "offload: none or optimizer; a larger context or wider layers hide more.",
    ),
)
