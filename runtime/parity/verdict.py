"""How far a layout may be from one process, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shipway.runtime.parity.ranks import Trace


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that count as equal."""

    gradients: float
    """Of every gradient, and of the first step's loss and norm."""
    later: float
    """Of loss and norm in the steps that follow: Muon brings small singular values to one, and what rounding
    moved with them."""
    loads: float
    """Share of a layer's choices that may go to other experts in the first step."""


TOLERANCES: Mapping[tuple[str, str], Tolerance] = {
    ("cpu", "fp32"): Tolerance(1e-5, 1e-4, 0.0),
    ("cuda", "fp32"): Tolerance(2e-2, 2e-1, 2e-2),
    ("cpu", "bf16"): Tolerance(1e-1, 2e-1, 5e-2),
    ("cuda", "bf16"): Tolerance(1e-1, 2e-1, 5e-2),
    ("cpu", "fp8"): Tolerance(4.5e-1, 4e-1, 1e-1),
    ("cuda", "fp8"): Tolerance(4.5e-1, 4e-1, 1e-1),
}
"""By device and dtype. GPUs multiply fp32 in reduced precision. In bf16 (8 bits of mantissa) layouts round at
different places, which also moves choices of experts; in fp8 (4 bits) what differs so is rounded coarsely,
by halves of rows under tensor parallel. A gradient that is missing or doubled is off by one."""

LATER = "later steps"
LOADS = "loads"


@dataclass(frozen=True)
class Verdict:
    """How far a layout is from one process."""

    name: str
    ranks: int
    differences: dict[str, float] = field(default_factory=dict)
    """Largest relative difference by what was compared."""
    reason: str = ""
    """Why it did not run, if it did not."""
    refused: bool = False
    """Whether the runtime says that it cannot run it: neither proven nor off."""

    def proven(self, tolerance: Tolerance) -> bool:
        """Whether it ran and nothing differs by more than the tolerance."""
        bounds = {LATER: tolerance.later, LOADS: tolerance.loads}
        return not self.reason and all(
            value <= bounds.get(what, tolerance.gradients) for what, value in self.differences.items()
        )

    def word(self, tolerance: Tolerance) -> str:
        """The verdict in a word or two."""
        if self.refused:
            return "not run by this version"
        if self.reason:
            return f"failed: {self.reason.strip().splitlines()[-1]}"
        if self.proven(tolerance):
            return "proven"
        return f"off by {max(self.differences.values()):.1e}"


def compare(expected: Trace, found: Trace) -> dict[str, float]:
    """Largest relative differences of a layout's trace; loads by the choices that moved."""
    differences = {
        "loss": _largest(expected.losses[:1], found.losses[:1]),
        "norm": _largest(expected.norms[:1], found.norms[:1]),
        LATER: _largest(expected.losses[1:] + expected.norms[1:], found.losses[1:] + found.norms[1:]),
        LOADS: max((_moved(load, found.loads.get(n)) for n, load in expected.loads.items()), default=0.0),
    }
    for name, whole in expected.gradients.items():
        mine = found.gradients.get(name)
        off = torch.inf if mine is None else float((mine - whole).norm() / whole.norm().clamp(min=1e-12))
        group = group_of(name)
        differences[group] = max(differences.get(group, 0.0), off)
    return differences


def group_of(parameter: str) -> str:
    """The column of the table that a parameter's gradient is in."""
    for group in ("router", "experts", "shared", "latent_", "residual", "norm", "attention"):
        if group in parameter:
            return group.rstrip("_")
    return "ends" if parameter.startswith(("embed", "head")) else "dense"


def _moved(expected: list[int], found: list[int] | None) -> float:
    """Share of a layer's choices that went to other experts."""
    if found is None:
        return torch.inf
    return sum(abs(f - e) for e, f in zip(expected, found, strict=True)) / 2 / max(sum(expected), 1)


def _largest(expected: list[float], found: list[float]) -> float:
    if len(expected) != len(found):
        return torch.inf
    return max(abs(f - e) / max(abs(e), 1e-12) for e, f in zip(expected, found, strict=True))
