"""Write a model's `model.py`: one readable file with what this model has, and nothing else."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from shipway.compiler.emit.constants import Kinds, constants, kinds_of
from shipway.compiler.emit.features import features, legend
from shipway.compiler.emit.imports import imports
from shipway.compiler.emit.optimizer_groups import optimizer_groups
from shipway.compiler.emit.templates import templates
from shipway.compiler.frozen import frozen
from shipway.schemas.model import Model, Position

LINE_LENGTH = 110
"""Of generated files, as of our own."""
ATTENTION_CLASSES = {"delta": "DeltaAttention", "latent": "LatentAttention", "grouped": "GroupedAttention"}


@frozen
class Header:
    """What a generated file says about where it came from."""

    name: str
    """Name of the blueprint."""
    shipway: str
    """Version that generated it."""
    plan_hash: str
    """Content hash of the plan."""
    command: str
    """Command that generates it again."""


def render_model(model: Model, *, header: Header) -> str:
    """Text of `model.py` for a validated model; equal inputs give equal text.

    Raises ValueError when the mixes do not fill the layers, or name a block whose dimensions are missing.
    """
    kinds = kinds_of(model)
    context = _context(model, kinds)
    resolved = constants(model, kinds)
    environment = templates("model")
    blocks = (environment.get_template(f"{block}.j2").render(context) for block in _blocks(context))
    body = "\n\n\n".join(block.strip() for block in blocks)
    text = environment.get_template("model.py.j2").render(
        header=header,
        features=[line for feature in features(model, kinds) for line in _bullet(feature)],
        legend=legend(model, kinds),
        imports=imports("\n".join((body, *(constant.value for constant in resolved)))),
        constants=resolved,
        optimizer_groups=optimizer_groups(model),
        body=body,
    )
    return text.rstrip() + "\n"


def _blocks(context: Mapping[str, Any]) -> Iterator[str]:
    """Templates of the file's blocks, in reading order: those that this model has."""
    uses, residual = context["uses"], context["residual"]
    chosen = (
        ("primitives", True),
        ("attention_residual", residual != "plain"),
        ("pages", uses["paged"]),
        ("delta_attention", context["delta"]),
        ("latent_attention", context["latent"]),
        ("grouped_attention", context["grouped"]),
        ("gated_unit", uses["gated_unit"]),
        ("router", context["experts"]),
        ("experts", context["experts"]),
        ("layer", True),
        ("plain_layer", uses["prediction"] and residual != "plain"),
        ("prediction", uses["prediction"]),
        ("vision", context["vision"]),
        ("caches", True),
        ("model", True),
        ("sampling", True),
    )
    return (name for name, wanted in chosen if wanted)


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(f"- {text}", LINE_LENGTH, subsequent_indent="  ")


def _context(model: Model, kinds: Kinds) -> dict[str, Any]:
    """What the templates of the blocks read."""
    delta, latent, grouped = model.attention.delta, model.attention.latent, model.attention.grouped
    experts = model.feed_forward.experts if "experts" in kinds.feed_forward else None
    values = delta is not None and delta.value_heads not in (None, delta.heads)
    return {
        "m": model,
        "kinds": kinds,
        "delta": delta if "delta" in kinds.attention else None,
        "latent": latent if "latent" in kinds.attention else None,
        "grouped": grouped if "grouped" in kinds.attention else None,
        "experts": experts,
        "vision": model.vision,
        "residual": model.residual.kind,
        "balancing": experts.balancing if experts is not None else None,
        "uses": _uses(model, kinds),
        "activation": _activation(model),
        "delta_value_heads": "DELTA_VALUE_HEADS" if values else "DELTA_HEADS",
        "delta_value_letter": "Hv" if values else "H",
        "latent_rotary": _rotary("LATENT", latent.position) if latent is not None else "",
        "grouped_rotary": _rotary("HEAD", grouped.position) if grouped is not None else "",
        **_layers(model, kinds),
        **_caches(kinds),
    }


def _uses(model: Model, kinds: Kinds) -> dict[str, bool]:
    """Features that several templates ask about."""
    experts = model.feed_forward.experts if "experts" in kinds.feed_forward else None
    positions = [
        part.position
        for kind, part in (("latent", model.attention.latent), ("grouped", model.attention.grouped))
        if part is not None and kind in kinds.attention
    ]
    return {
        "gated_unit": "dense" in kinds.feed_forward or (experts is not None and experts.shared > 0),
        "choice_bias": experts is not None and experts.balancing.kind in ("quantile", "bias"),
        "rotary": any(position.kind == "rotary" for position in positions),
        "paged": bool(positions),
        "prediction": model.multi_token_prediction is not None,
    }


def _activation(model: Model) -> Any:
    """How the templates call the gated unit's activation."""

    def call(gate: str, up: str) -> str:
        if model.feed_forward.activation.kind == "situ":
            return f"situ_glu({gate}, {up}, SITU_BETA, SITU_LINEAR_BETA)"
        return f"swiglu({gate}, {up})"

    return call


def _rotary(prefix: str, position: Position) -> str:
    """Last arguments of the rotary kernel; empty without rotary positions."""
    if position.kind == "none":
        return ""
    return f"{prefix}_THETA" if position.yarn is None else f"{prefix}_THETA, {prefix}_YARN"


def _layers(model: Model, kinds: Kinds) -> dict[str, Any]:
    """How a layer is told which blocks it holds, and how it makes its attention."""
    attention = [ATTENTION_CLASSES[kind] + "()" for kind in kinds.attention]
    parameters, arguments, last = [], [], []
    if len(attention) > 1:
        parameters.append("attention: str")
        arguments.append("ATTENTION[i]")
        last.append("ATTENTION[-1]")
    if len(kinds.feed_forward) > 1:
        parameters.append("feed_forward: str")
        arguments.append("FEED_FORWARD[i]")
        last.append("FEED_FORWARD[-1]")
    plain = list(parameters)
    if model.residual.kind == "block":
        parameters.append("opens_block: bool")
        arguments.append("opens_block=i % BLOCK_LAYERS == 0")
    return {
        "layer_parameters": ", ".join(["self", *parameters]),
        "plain_layer_parameters": ", ".join(["self", *plain]),
        "layer_arguments": ", ".join(arguments),
        "last_layer_arguments": ", ".join(last),
        "attention_made": tuple(zip(kinds.attention, attention, strict=True)),
    }


def _caches(kinds: Kinds) -> dict[str, str]:
    """What generation keeps of each kind of layer: a state, or vectors of all tokens."""
    if kinds.attention == ("delta",):
        return {"cache_type": "DeltaCache", "cache_made": "DeltaCache()"}
    if "delta" not in kinds.attention:
        return {"cache_type": "Pool", "cache_made": "Pool(self.pages)"}
    made = 'DeltaCache() if ATTENTION[i] == "delta" else Pool(self.pages)'
    return {"cache_type": "DeltaCache | Pool", "cache_made": made}
