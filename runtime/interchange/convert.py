"""Export and import of whole models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.interchange.families import config_of
from shipway.runtime.interchange.files import PublishedFolder
from shipway.runtime.interchange.names import as_published, copies, place_of
from shipway.schemas.model import Model

INDIFFERENT = {
    "architectures",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}
"""Keys of config.json that no weight depends on."""


def published_tensors(state: Mapping[str, Tensor], model: Model) -> Iterator[tuple[str, Tensor]]:
    """Our state_dict under published names and shapes."""
    for name, tensor in state.items():
        place = place_of(name, model)
        yield from zip(place.names, place.layout.pack(tensor), strict=True)
    for theirs, ours in copies(model).items():
        yield theirs, state[ours].clone()


@torch.no_grad()
def take_weights(module: nn.Module, model: Model, published: PublishedFolder) -> None:
    """Fill a generated model from published files, in place.

    Raises Fatal when the config is of another model, or tensors are missing, left over or misshapen.
    """
    differing = list(_differences(config_of(model), published.config))
    if differing:
        raise Fatal("config.json is of another model than the blueprint\n  " + "\n  ".join(differing))
    state = module.state_dict()
    places = {name: place_of(name, model) for name in state}
    repeated = copies(model)
    wanted = {theirs for place in places.values() for theirs in place.names} | set(repeated)
    there = {as_published(name): name for name in published.where}
    missing, left_over = sorted(wanted - set(there)), sorted(set(there) - wanted)
    if missing or left_over:
        raise Fatal(_counted("missing", missing) + _counted("left over", left_over))
    for name, target in state.items():
        place = places[name]
        tensor = place.layout.unpack([published.read(there[theirs]) for theirs in place.names])
        if tensor.shape != target.shape:
            raise Fatal(f"{place.names[0]} gives {tuple(tensor.shape)}, {name} is {tuple(target.shape)}")
        target.copy_(tensor)
    for theirs, ours in repeated.items():
        if not torch.equal(published.read(there[theirs]).to(state[ours]), state[ours]):
            raise Fatal(f"{theirs} is not {places[ours].names[0]} again: here prediction shares {ours}")


def _counted(what: str, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{len(names)} tensors are {what}: {shown}\n"


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Keys that both sides have, with different values; what a file leaves out is up to its reader."""
    for key, value in ours.items():
        if key in INDIFFERENT or key not in theirs:
            continue
        other = theirs[key]
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differences(value, other, f"{path}{key}.")
        elif value != other:
            yield f"{path}{key} is {other!r}, the blueprint has {value!r}"
