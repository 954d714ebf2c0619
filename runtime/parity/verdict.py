"""How far a layout may be from one process, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shipway.runtime.parity.groups import GROUPS, group_of
from shipway.runtime.parity.ranks import Trace

LOSS = "loss"
NORM = "norm"
OWN_NORM = "norm of own"
"""The norm that a layout finds against that of its own gradients, gathered whole, of all and of each group:
an axis left out of the sum shows whatever the dtype, and however small the group's part in the whole."""
LATER = "later steps"
LOADS = "loads"
SCALE = "scale"
"""How far any gradient's projection on the expected one is from being as long: doubled it is off by one, that
of half the batch or of half the experts by a half, while rounding, which points anywhere, hardly shows."""
FIGURES = (LOSS, NORM, OWN_NORM, SCALE, LATER, LOADS)
"""Columns that are no differences of gradients."""

EXACT: Mapping[str, float] = {OWN_NORM: 3e-5, SCALE: 0.25}
"""Bounds whatever the dtype: gradients are fp32 when they are summed up."""
LEAST: Mapping[str, float] = {LOSS: 2.0**-12}
BF16_ROUNDING = 2.0**-8
"""Least error that a multiple is taken of: one rounding to bf16 (8 bits of mantissa), for one process may be
nearer to fp32 by luck. The loss is a mean over some 700 tokens, whose roundings are independent."""
BLIND = 0.75
"""No gradient may be allowed to be off by as much: one that is missing is off by one."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that count as equal; or multiples of what one process is off itself."""

    gradients: float
    """Of every gradient, and of the first step's loss and norm."""
    later: float
    """Of loss and norm in the steps that follow: Muon brings small singular values to one, and what rounding
    moved with them."""
    loads: float
    """Share of a layer's choices that may go to other experts in the first step."""
    of_own: bool = False
    """Whether layout and one process are both held against one process in fp32, and the layout may be off by
    these multiples of what the one process in its dtype is off."""

    def bounds(self, differences: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
        """Largest difference allowed in each column; `own` differences are those of one process."""
        found = {}
        for column in differences:
            bound = {LATER: self.later, LOADS: self.loads}.get(column, self.gradients)
            if self.of_own:
                bound *= max(own.get(column, 0.0), LEAST.get(column, BF16_ROUNDING))
            found[column] = EXACT.get(column, bound)
        return found

    def describe(self) -> str:
        """In words."""
        figures = f"gradients {self.gradients:g}, later {self.later:g}, loads {self.loads:g}"
        if not self.of_own:
            return f"relative difference from one process at most: {figures}"
        return (
            "relative difference from one process in fp32 at most these multiples of what one process in the"
            f" same dtype is off (counted as one rounding at least): {figures}"
        )


TOLERANCES: Mapping[tuple[str, str], Tolerance] = {
    ("cpu", "fp32"): Tolerance(1e-5, 1e-4, 0.0),
    ("cuda", "fp32"): Tolerance(1e-3, 5e-2, 1e-2),
    ("cpu", "bf16"): Tolerance(2.0, 4.0, 2.0, of_own=True),
    ("cuda", "bf16"): Tolerance(2.0, 4.0, 2.0, of_own=True),
    ("cpu", "fp8"): Tolerance(4.5e-1, 4e-1, 1e-1),
    ("cuda", "fp8"): Tolerance(4.5e-1, 4e-1, 1e-1),
}
"""By device and dtype. In fp32 a GPU sums with atomics and in other tiles. In bf16 layouts round at different
places, which also moves choices of experts: no more than one process' own roundings do. In fp8 (4 bits) what
differs so is rounded coarsely, by halves of rows under tensor parallel. A gradient that is missing or doubled
is off by one, that of half the batch by a half."""


@dataclass(frozen=True)
class Verdict:
    """How far a layout is from one process, and how far it may be."""

    name: str
    ranks: int
    differences: dict[str, float] = field(default_factory=dict)
    """Largest relative difference by what was compared."""
    bounds: dict[str, float] = field(default_factory=dict)
    """Largest that counts as equal, by the same."""
    own: dict[str, float] = field(default_factory=dict)
    """What one process in the same dtype is off, where bounds are multiples of it."""
    case: str = ""
    """Model and batch that it was shown on."""
    reason: str = ""
    """Why it did not run, if it did not."""
    refused: bool = False
    """Whether the runtime says that it cannot run it: neither proven nor off."""

    @property
    def proven(self) -> bool:
        """Whether it ran, nothing differs by more than it may, and what it may would show a fault."""
        return not self.reason and not self._off and not self._blind

    @property
    def _off(self) -> list[str]:
        """Columns beyond their bounds; a difference that is no number is beyond every bound."""
        return [c for c, value in self.differences.items() if not value <= self.bounds[c]]

    @property
    def _blind(self) -> list[str]:
        return [c for c, bound in self.bounds.items() if c not in FIGURES and bound >= BLIND]

    @property
    def word(self) -> str:
        """The verdict in a few words."""
        if self.refused:
            return "not run by this version"
        if self.reason:
            return f"failed: {self.reason.strip().splitlines()[-1]}"
        if self._off:
            worst = max(self._off, key=lambda c: self.differences[c] / self.bounds[c])
            return f"off: {worst} by {self.differences[worst]:.1e}"
        if self._blind:
            return f"cannot be told: {self._blind[0]} may be off by {self.bounds[self._blind[0]]:.1e}"
        return "proven"


def compare(expected: Trace, found: Trace) -> dict[str, float]:
    """Largest relative differences of a layout's trace; loads by the choices that moved."""
    differences = {
        LOSS: _largest(expected.losses[:1], found.losses[:1]),
        NORM: _largest(expected.norms[:1], found.norms[:1]),
        OWN_NORM: _own_norm(found),
        SCALE: 0.0,
        LATER: _largest(expected.losses[1:] + expected.norms[1:], found.losses[1:] + found.norms[1:]),
        LOADS: max((_moved(load, found.loads.get(n)) for n, load in expected.loads.items()), default=0.0),
    }
    for name, whole in expected.gradients.items():
        mine = found.gradients.get(name)
        off = torch.inf if mine is None else float((mine - whole).norm() / whole.norm().clamp(min=1e-12))
        group = group_of(name)
        differences[group] = _worse(differences.get(group, 0.0), off)
        scale = torch.inf if mine is None else _scale(whole, mine)
        differences[SCALE] = _worse(differences[SCALE], scale)
    return differences


def _scale(expected: Tensor, found: Tensor) -> float:
    """Of the projection of one gradient on another."""
    e, f = expected.flatten().double(), found.flatten().double()
    square = float(e @ e)
    return abs(float(e @ f) / square - 1) if square > 1e-24 else 0.0


def _own_norm(trace: Trace) -> float:
    """Largest difference of a norm over all ranks from that of the gradients themselves."""
    members = {group: [n for n in trace.gradients if group_of(n) == group] for group in GROUPS}
    pairs = [(_norm(trace.gradients), trace.norms[0])]
    pairs += [
        (_norm({name: trace.gradients[name] for name in names}), trace.group_norms.get(group, torch.nan))
        for group, names in members.items()
        if names
    ]
    return _largest([whole for whole, _ in pairs], [found for _, found in pairs])


def _norm(gradients: Mapping[str, Tensor]) -> float:
    """Of all gradients together, summed in float64."""
    return sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5


def _moved(expected: list[int], found: list[int] | None) -> float:
    """Share of a layer's choices that went to other experts."""
    if found is None:
        return torch.inf
    return sum(abs(f - e) for e, f in zip(expected, found, strict=True)) / 2 / max(sum(expected), 1)


def _largest(expected: list[float], found: list[float]) -> float:
    if len(expected) != len(found):
        return torch.inf
    largest = 0.0
    for e, f in zip(expected, found, strict=True):
        largest = _worse(largest, abs(f - e) / max(abs(e), 1e-12))
    return largest


def _worse(a: float, b: float) -> float:
    """The larger; what is no number is worse than any."""
    return a if a != a or a >= b else b
