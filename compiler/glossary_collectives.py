"""Terms of the ledger of collectives: what is sent, by whom, and why."""

from __future__ import annotations

from shipway.compiler.glossary import Term

_CUT_BLOCKS = (
    "embedding",
    "head",
    "feed-forward",
    "shared experts",
    "delta attention",
    "latent attention",
    "grouped attention",
)


def _with_gradients(*names: str) -> tuple[str, ...]:
    return tuple(f"gradients of {name}" for name in names)


COLLECTIVE_TERMS = (
    Term(
        "layer parameters",
        "FSDP gathers the weights of a layer outside its experts and router before they are used, and sums"
        " and shards their gradients after.",
        "zero: 2 gathers once a micro-batch, zero: 3 twice; larger micro-batches.",
        aliases=_with_gradients("layer parameters"),
    ),
    Term(
        "router parameters",
        "FSDP gathers routers apart from the rest of their layer, as they compute in fp32.",
        aliases=_with_gradients("router parameters"),
    ),
    Term(
        "expert parameters",
        "FSDP gathers the weights of a layer's routed experts, over a group of their own.",
        "expert_parallel: each rank then holds fewer experts.",
        aliases=_with_gradients("expert parameters"),
    ),
    Term(
        "embedding, head and what is outside layers",
        "FSDP gathers them once a micro-batch.",
        aliases=_with_gradients("embedding, head and what is outside layers"),
    ),
    Term("gradient shards between replicas", "Replicas sum their gradients, once a step."),
    Term(
        "gradients of fp32 vectors",
        "Decays and biases of delta attention that FSDP leaves whole on every rank.",
    ),
    Term(
        "gradients of what tp does not split",
        "Norms, routers, latents: each tensor-parallel rank has a part of their gradient's sum.",
    ),
    Term(
        "hidden states received",
        "What pipeline ranks hand over, forward and backward; each message is a send or a receive.",
        aliases=(
            "hidden states sent",
            "gradients of hidden states received",
            "gradients of hidden states sent",
        ),
    ),
    Term(
        "dispatch",
        "Tokens travel to the ranks of their experts; shared experts run meanwhile.",
        aliases=("dispatch gradient", "rows of each expert"),
    ),
    Term("combine", "The experts' results travel back to the tokens' ranks.", aliases=("combine gradient",)),
    Term(
        "largest logits",
        "Of each token over the ranks that share the vocabulary, or of each head, which QK-clip watches.",
        aliases=("sums of exponentials, targets' logits",),
    ),
    Term(
        "block input and output",
        "Tensor parallel gathers the sequence before a block and reduces its result after it; backward does"
        " the same with gradients.",
        aliases=tuple(
            f"{block} {end}{gradient}"
            for block in _CUT_BLOCKS
            for end in ("input", "output")
            for gradient in ("", " gradient")
        ),
    ),
    Term(
        "delta state",
        "Context parallel: the state that a rank's slice of the sequence hands to those after it.",
        aliases=("delta state gradient",),
    ),
    Term(
        "delta inputs for heads",
        "Context parallel by heads: slices of all heads are exchanged for whole rows of some, and back.",
        aliases=("delta outputs for slices", *_with_gradients("delta inputs", "delta outputs")),
    ),
    Term(
        "keys and values",
        "Context parallel: each rank gathers what the others' tokens offer to attention, as latents where no"
        " position is mixed into them.",
        aliases=(
            "key and value gradients",
            "key-value latents",
            *_with_gradients("keys and values", "key-value latents"),
        ),
    ),
    Term(
        "queries to attend for",
        "Context parallel: queries go where causal work is equal on all ranks, and outputs come back.",
        aliases=("attention outputs", *_with_gradients("attention outputs", "queries")),
    ),
    Term(
        "ends of q and k inputs",
        "Context parallel: last tokens of each slice, which short convolutions reach back to.",
        aliases=("ends of v inputs", *_with_gradients("ends of q and k inputs", "ends of v inputs")),
    ),
    Term(
        "balancing statistics",
        "Choices and scores of each row, summed over the ranks that share it, for the auxiliary loss.",
        aliases=("balancing statistics of slices", "gradient of balancing statistics"),
    ),
    Term("tokens of the step", "Every rank learns how many tokens count, which the loss is divided by."),
    Term("loss", "Summed over all ranks, once a step."),
    Term("gradient norm", "Squares summed over the axes that parameters are sharded over, then over stages."),
    Term(
        "momentum to matrices' owners",
        "Muon puts matrices that several ranks cut together at one of them, and sends the update back.",
        aliases=("updates from matrices' owners",),
    ),
    Term(
        "updates to copies",
        "Ranks that hold the same blocks share Muon's work and send each other the result.",
    ),
    Term(
        "experts' loads",
        "Counts of routers over all ranks, from which loads are reported and biases set.",
        aliases=("load to balance by", "margins to balance by", "tokens to balance by"),
    ),
    Term("data", "Axis of the ranks that read different rows: dp_shard without cp."),
    Term("dp_shard x tp", "Ranks that share a matrix which both FSDP and tensor parallel cut."),
)
