"""The blocks that `blocks_check` compares: every one of a generated model, as small as GPU kernels take them.

Widths are those that the kernels are made for (heads of 64 and 128, latent keys of 192 with values of 128,
chunks of 64); rows end inside a chunk, and packed documents begin inside chunks and tiles.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import reference
from bench.reference import Reference, Weights
from bench.reference_tower import vision_tower
from shipway.runtime.kernels import positions_from
from shipway.schemas.model import AttentionKind, Model

Inputs = Mapping[str, Tensor]
ROWS, LENGTH, SHORT = 2, 80, 32
"""Rows of a block, tokens of each, and of those that go through a whole model."""
DOCUMENTS = (1, 37, 81, 41)
"""Tokens of the packed documents; together as many as the rows have."""

BASE: dict[str, Any] = {
    "vocabulary": 512,
    "width": 256,
    "layers": 1,
    "attention": {
        "mix": {"pattern": ["grouped"]},
        "delta": {"heads": 16, "decay_rank": 64},
        "latent": {"heads": 2, "query_rank": 192, "kv_rank": 128},
        "grouped": {"heads": 4, "kv_heads": 2, "head_width": 64},
    },
    "feed_forward": {
        "mix": {"pattern": ["dense"]},
        "dense_inner_width": 512,
        "experts": {"routed": 16, "active": 4, "inner_width": 128, "latent_width": 128, "shared": 2},
        "activation": {"kind": "situ"},
    },
    "init_std": 0.06,
}
"""Weights near 1 / sqrt(width), so that what blocks return is near 1."""

ROTARY = {"kind": "rotary", "yarn": {"factor": 8.0, "original_context": 32}}
MIXTURE = {"feed_forward.mix": {"pattern": ["experts"]}}
ORDINARY = MIXTURE | {
    "feed_forward.experts.latent_width": None,
    "feed_forward.activation": {"kind": "swiglu"},
}


@dataclass(frozen=True)
class Block:
    """A module of a generated model, what goes in, and what has to come out."""

    name: str
    model: Model
    place: str
    """Name of the module in the model; empty for the model itself."""
    draw: Callable[[torch.Generator, Weights], Inputs]
    """Inputs on the CPU, in bf16 where they are no integers, for a module with such weights in float64."""
    found: Callable[[nn.Module, Inputs], list[Tensor]]
    """What the module returns."""
    expected: Callable[[Weights, Inputs], list[Tensor]]
    """The same from the equations, in float64."""
    forward_bound: float = 0.01
    backward_bound: float = 0.02
    bounds: Mapping[str, float | None] = field(default_factory=dict)
    """Of gradients that need another, by the end of the name; None where none is compared."""
    gradients: bool = True


def architecture(**changes: Any) -> Model:
    """The model of BASE, with changes by dotted path."""
    data = copy.deepcopy(BASE)
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = data
        for part in sections:
            section = section[part]
        section[key] = copy.deepcopy(value)
    return Model.from_data(data)


def all_blocks() -> Iterator[Block]:
    """Every block in every form."""
    yield from attentions()
    yield from feed_forwards()
    yield from residuals()
    yield from pictures()
    yield from whole_models()


def attentions() -> Iterator[Block]:
    """The three attentions, in rows and in packed documents."""
    forms: dict[str, tuple[AttentionKind, dict[str, Any]]] = {
        "delta attention, bounded": ("delta", {}),
        "delta attention, bounded, 64 wide": (
            "delta",
            {"attention.delta.key_width": 64, "attention.delta.value_width": 64},
        ),
        "delta attention, grouped heads": (
            "delta",
            {"attention.delta.heads": 8, "attention.delta.value_heads": 16},
        ),
        "delta attention, unbounded, low-rank gate": (
            "delta",
            {
                "attention.delta.decay": {"kind": "unbounded"},
                "attention.delta.output_gate": "low_rank",
                "attention.delta.output_gate_bias": True,
            },
        ),
        "latent attention, NoPE, low-rank query": ("latent", {}),
        "latent attention, rotary with YaRN": (
            "latent",
            {
                "attention.latent.position": ROTARY,
                "attention.latent.query_rank": None,
                "attention.latent.output_gate": "per_head",
                "attention.latent.norm_eps": 1e-6,
            },
        ),
        "grouped attention, rotary": ("grouped", {"attention.grouped.query_key_norm": True}),
        # under NoPE the gradient of a key's bias is zero
        "grouped attention, rotary, bias": ("grouped", {"attention.grouped.bias": True}),
        "grouped attention, NoPE, 128 wide, gated": (
            "grouped",
            {
                "attention.grouped.position": {"kind": "none"},
                "attention.grouped.head_width": 128,
                "attention.grouped.output_gate": "elementwise",
            },
        ),
    }
    for name, (kind, changes) in forms.items():
        model = architecture(**{"attention.mix": {"pattern": [kind]}}, **changes)
        for packed in (False, True):
            yield attention(name + (", documents" if packed else ""), model, kind, packed)


def attention(name: str, model: Model, kind: AttentionKind, packed: bool) -> Block:
    """One attention over rows, or over one row of documents."""
    lengths = DOCUMENTS if packed else (LENGTH,) * ROWS
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def draw(generator: torch.Generator, weights: Weights) -> Inputs:
        rows = 1 if packed else ROWS
        x = normal(generator, rows, sum(lengths) // rows, model.width)
        return {"x": x, "cu_seqlens": bounds} if packed else {"x": x}

    def found(module: nn.Module, inputs: Inputs) -> list[Tensor]:
        x, cu_seqlens = inputs["x"], inputs.get("cu_seqlens")
        further = {"cu_seqlens": cu_seqlens}
        if "positions" in inspect.signature(type(module).forward).parameters:
            further["positions"] = positions_from(cu_seqlens, *x.shape[:2], x.device)
        return [module(x, **further)]

    def expected(weights: Weights, inputs: Inputs) -> list[Tensor]:
        documents = inputs["x"].flatten(0, 1).split(lengths)
        parts = [Reference(model, weights).attention(kind, document, weights) for document in documents]
        return [torch.cat(parts).view_as(inputs["x"])]

    # sums over all tokens that nearly cancel
    cancelling = {"a_log": 0.1, "k_proj.bias": 0.05}
    return Block(name, model, "layers.0.attention", draw, found, expected, bounds=cancelling)


def feed_forwards() -> Iterator[Block]:
    """Gated units, and mixtures with each way of scoring, limiting and balancing."""
    for kind in ("situ", "swiglu"):
        yield gated_unit(architecture(**{"feed_forward.activation": {"kind": kind}}))
    forms: dict[str, dict[str, Any]] = {
        "Stable LatentMoE, sigmoid, quantile balancing": MIXTURE,
        "LatentMoE, routed by the latent, no norm": MIXTURE
        | {
            "feed_forward.experts.router_input": "latent",
            "feed_forward.experts.latent_norm": False,
            "feed_forward.experts.renormalize": False,
            "feed_forward.experts.balancing": {"kind": "none"},
        },
        "mixture of experts, sigmoid, groups, bias": ORDINARY
        | {
            "feed_forward.experts.groups": 4,
            "feed_forward.experts.active_groups": 2,
            "feed_forward.experts.scale": 2.5,
            "feed_forward.experts.balancing": {"kind": "bias"},
        },
        "mixture of experts, softmax, auxiliary loss": ORDINARY
        | {
            "feed_forward.experts.scores": "softmax",
            "feed_forward.experts.shared_gate": True,
            "feed_forward.experts.balancing": {"kind": "auxiliary", "weight": 0.01},
        },
    }
    for name, changes in forms.items():
        yield mixture(name, architecture(**changes))


def gated_unit(model: Model) -> Block:
    """A dense feed-forward."""

    def draw(generator: torch.Generator, weights: Weights) -> Inputs:
        return {"x": normal(generator, ROWS, LENGTH, model.width, spread=4.0)}  # into the caps of SiTU

    def expected(weights: Weights, inputs: Inputs) -> list[Tensor]:
        x = inputs["x"].flatten(0, 1)
        return [torch.stack([reference.gated_unit(row, weights, model) for row in x]).view_as(inputs["x"])]

    name = f"gated unit, {model.feed_forward.activation.kind}"
    return Block(name, model, "layers.0.feed_forward", draw, run, expected)


def mixture(name: str, model: Model) -> Block:
    """A mixture of experts, on tokens whose choice of experts no rounding turns."""
    dims = model.feed_forward.experts
    assert dims is not None
    auxiliary = dims.balancing.kind == "auxiliary"

    def choices(x: Tensor, weights: Weights) -> list[list[int]]:
        found = (reference.mixture(row, weights, model, dims, model.norm_eps)[2] for row in x.double())
        return [sorted(chosen) for chosen in found]

    @torch.no_grad()
    def draw(generator: torch.Generator, weights: Weights) -> Inputs:
        x = normal(generator, 3 * ROWS * LENGTH, model.width)
        firm = [True] * len(x)
        for _ in range(2):  # twice as much noise as one rounding to bf16 makes
            noisy = x.double() * (1 + 2**-8 * torch.randn(x.shape, generator=generator))
            same = zip(choices(x, weights), choices(noisy, weights), strict=True)
            firm = [was and a == b for was, (a, b) in zip(firm, same, strict=True)]
        return {"x": x[torch.tensor(firm)][: ROWS * LENGTH].unflatten(0, (ROWS, -1))}

    def found(module: nn.Module, inputs: Inputs) -> list[Tensor]:
        return [module(inputs["x"]), *([module.router.auxiliary_loss] if auxiliary else [])]

    def expected(weights: Weights, inputs: Inputs) -> list[Tensor]:
        rows = [
            [reference.mixture(token, weights, model, dims, model.norm_eps) for token in row]
            for row in inputs["x"]
        ]
        outputs = [torch.stack([torch.stack([y for y, _, _ in row]) for row in rows])]
        if auxiliary:
            routed = [[(scores, chosen) for _, scores, chosen in row] for row in rows]
            outputs.append(torch.stack([reference.imbalance(row, dims) for row in routed]))
        return outputs

    return Block(name, model, "layers.0.feed_forward", draw, found, expected)


def residuals() -> Iterator[Block]:
    """The softmax over depth, over few sources and many."""
    model = architecture(residual={"kind": "full"})
    for sources in (2, 9):

        def draw(generator: torch.Generator, weights: Weights, sources: int = sources) -> Inputs:
            names = [f"source {i}" for i in range(sources)]
            return {name: normal(generator, ROWS, LENGTH, model.width) for name in names}

        def found(module: nn.Module, inputs: Inputs) -> list[Tensor]:
            mixed, handed_on = module(list(inputs.values()))
            return [mixed, *handed_on]

        def expected(weights: Weights, inputs: Inputs) -> list[Tensor]:
            flat = [source.flatten(0, 1) for source in inputs.values()]
            mixed = reference.attention_residual(flat, weights, model.norm_eps)
            return [mixed.unflatten(0, (ROWS, LENGTH)), *inputs.values()]

        name = f"attention residual, {sources} sources"
        yield Block(name, model, "output_residual", draw, found, expected)


def pictures() -> Iterator[Block]:
    """The vision tower with its projector, on pictures of several sizes at once."""
    sizes = ((4, 6), (2, 2), (8, 4))
    model = architecture(
        vision={
            "layers": 2,
            "width": 128,
            "heads": 2,
            "head_width": 64,
            "inner_width": 256,
            "patch": 4,
            "position_grid": 6,
            "projector_width": 256,
        }
    )
    assert model.vision is not None
    channels = 3 * model.vision.patch**2

    def draw(generator: torch.Generator, weights: Weights) -> Inputs:
        patches = normal(generator, sum(rows * columns for rows, columns in sizes), channels)
        return {"patches": patches, "grids": torch.tensor(sizes)}

    def found(module: nn.Module, inputs: Inputs) -> list[Tensor]:
        return [module(inputs["patches"], inputs["grids"])]

    def expected(weights: Weights, inputs: Inputs) -> list[Tensor]:
        parts = inputs["patches"].split([rows * columns for rows, columns in sizes])
        towers = [vision_tower(part, weights, model, *size) for part, size in zip(parts, sizes, strict=True)]
        return [torch.cat(towers)]

    yield Block("vision tower and projector", model, "vision", draw, found, expected, 0.02, 0.03)


def whole_models() -> Iterator[Block]:
    """The head alone, and the loss of whole models: layers joined over depth, further predictions."""
    yield head(architecture())
    mixed = {"layers": 4, "attention.mix": ["delta", "latent", "grouped", "delta"]}
    forms: dict[str, dict[str, Any]] = {
        "whole model, plain residual, tied": mixed | {"tied_embeddings": True},
        "whole model, full attention residual": mixed | {"residual": {"kind": "full"}},
        "whole model, block attention residual": mixed | {"residual": {"kind": "block", "block_layers": 2}},
        "whole model, two further predictions": {"multi_token_prediction": {"depth": 2}},
    }
    yield from (whole(name, architecture(**changes)) for name, changes in forms.items())
    yield decoding(architecture(**mixed, residual={"kind": "block", "block_layers": 2}))


def head(model: Model) -> Block:
    """Logits, and the loss that never makes them whole."""

    def draw(generator: torch.Generator, weights: Weights) -> Inputs:
        labels = torch.randint(model.vocabulary, (ROWS, LENGTH), generator=generator)
        labels[:, ::5] = -100
        return {"x": normal(generator, ROWS, LENGTH, model.width), "labels": labels}

    def found(module: nn.Module, inputs: Inputs) -> list[Tensor]:
        return [module(inputs["x"], inputs["labels"]), module(inputs["x"])]

    def expected(weights: Weights, inputs: Inputs) -> list[Tensor]:
        logits = inputs["x"] @ weights["weight"].T
        loss = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
        return [loss, logits]

    return Block("cross-entropy head", model, "head", draw, found, expected)


def whole(name: str, model: Model) -> Block:
    """A model from tokens to the sum of their losses, every row a document."""

    def draw(generator: torch.Generator, weights: Weights) -> Inputs:
        tokens = torch.randint(model.vocabulary, (ROWS, SHORT), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[:, -1] = -100
        return {"tokens": tokens, "labels": labels}

    def found(module: nn.Module, inputs: Inputs) -> list[Tensor]:
        return [module(inputs["tokens"], inputs["labels"])]

    def expected(weights: Weights, inputs: Inputs) -> list[Tensor]:
        losses = map(Reference(model, weights).loss, inputs["tokens"], inputs["labels"])
        return [torch.stack(list(losses)).sum()]

    return Block(name, model, "", draw, found, expected, 0.02, 0.08, {"a_log": None})


def decoding(model: Model) -> Block:
    """Two prompts read at once, and what follows each token by token out of the caches."""
    prompts, steps = (70, 3), 6

    def draw(generator: torch.Generator, weights: Weights) -> Inputs:
        lengths = {str(i): prompt + steps for i, prompt in enumerate(prompts)}
        return {i: torch.randint(model.vocabulary, (n,), generator=generator) for i, n in lengths.items()}

    def found(module: nn.Module, inputs: Inputs) -> list[Tensor]:
        texts = inputs.values()
        logits, caches = module.prefill([text[:-steps] for text in texts])
        following = torch.stack([text[-steps:] for text in texts], 1)  # [steps, B]
        return [logits, *(module.step(tokens, caches) for tokens in following)]

    def expected(weights: Weights, inputs: Inputs) -> list[Tensor]:
        logits = [Reference(model, weights).logits(text)[-steps - 1 :] for text in inputs.values()]
        return list(torch.stack(logits, 1))

    return Block("decoding from caches", model, "", draw, found, expected, 0.05, gradients=False)


def run(module: nn.Module, inputs: Inputs) -> list[Tensor]:
    """A module of one input and one output."""
    return [module(inputs["x"])]


def normal(generator: torch.Generator, *shape: int, spread: float = 1.0) -> Tensor:
    """Drawn in fp32, rounded to bf16."""
    return (torch.randn(*shape, generator=generator) * spread).bfloat16()
