"""Sums that ranks add up, and the means that are read from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tally:
    """Named sums with their counts; every rank has the same names in the same order."""

    names: tuple[str, ...]
    sums: Tensor
    """[names] float64."""
    counts: Tensor
    """[names] float64."""

    @staticmethod
    def zero(names: tuple[str, ...], device: torch.device | str = "cpu") -> Tally:
        """Nothing counted yet."""
        return Tally(
            names,
            torch.zeros(len(names), dtype=torch.float64, device=device),
            torch.zeros(len(names), dtype=torch.float64, device=device),
        )

    def add(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add to one sum and its count."""
        index = self.names.index(name)
        self.sums[index] += total
        self.counts[index] += count

    def reduced(self, all_reduce: Callable[[Tensor], object]) -> Tally:
        """The tally over all ranks; `all_reduce` sums a tensor in place."""
        both = torch.stack([self.sums, self.counts])
        all_reduce(both)
        return Tally(self.names, both[0], both[1])

    def means(self) -> Mapping[str, float]:
        """Mean of each name that has been counted."""
        return {
            name: float(total / count)
            for name, total, count in zip(self.names, self.sums, self.counts, strict=True)
            if count > 0
        }


def joined(tallies: Mapping[str, Tally]) -> Tally:
    """All tallies as one, names prefixed by `key/`, so that one all-reduce serves them all."""
    names = tuple(f"{key}/{name}" for key, tally in tallies.items() for name in tally.names)
    parts = list(tallies.values())
    return Tally(names, torch.cat([t.sums for t in parts]), torch.cat([t.counts for t in parts]))
