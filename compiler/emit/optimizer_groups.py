"""Which optimizer takes each parameter of a generated model: the catalogue's word, as few patterns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from shipway.compiler.lower import lower
from shipway.compiler.operators.base import Parameter
from shipway.schemas.model import Model

Group = tuple[str, int] | tuple[str, bool]
"""("muon", row blocks orthogonalised apart) or ("adamw", whether it decays)."""

_LAYER = re.compile(r"\.(\d+)\.")


def optimizer_groups(model: Model) -> tuple[tuple[str, Group], ...]:
    """(regular expression on a name, group), first match wins; buffers are left out."""
    names: dict[str, dict[Group, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, parameter in lower(model).named_parameters():
        if parameter.optimizer != "none":
            names[_LAYER.sub(".*.", name)][group_of(parameter)].append(name)
    patterns: dict[str, Group] = {}
    agreed = {ending: next(iter(groups)) for ending, groups in names.items() if len(groups) == 1}
    for ending, groups in names.items():
        for group, members in groups.items():
            pattern = _shortest(ending, agreed, names) if ending in agreed else _of_layers(ending, members)
            patterns[pattern] = group
    return tuple(patterns.items())


def group_of(parameter: Parameter) -> Group:
    """Muon with its heads, or AdamW; weight decay takes matrices, not vectors, filters or positions."""
    if parameter.optimizer == "muon":
        return "muon", parameter.muon_heads
    spared = "conv." in parameter.name or parameter.name == "position"
    return "adamw", len(parameter.shape) > 1 and not spared


def _shortest(ending: str, agreed: Mapping[str, Group], names: Iterable[str]) -> str:
    """The fewest last words of `ending` that no name of another group ends in too."""
    words = ending.split(".")
    for count in range(1, len(words)):
        suffix = "." + ".".join(words[-count:])
        rivals = {agreed.get(name) for name in names if f".{name}".endswith(suffix)}
        if rivals == {agreed[ending]} and "*" not in suffix:
            return rf"\b{re.escape(suffix[1:])}$"
    return "^" + re.escape(ending).replace(r"\*", r"\d+") + "$"


def _of_layers(ending: str, names: list[str]) -> str:
    """The pattern of the layers that `names` stand in, where layers differ."""
    layers = "|".join(dict.fromkeys(_LAYER.findall(name)[0] for name in names))
    return "^" + re.escape(ending).replace(r"\*", f"({layers})", 1).replace(r"\*", r"\d+") + "$"
