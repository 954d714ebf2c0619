"""How one of our tensors lies in published files: as one tensor or several, reshaped or reordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class TensorLayout(Protocol):
    """A one-to-one change of form."""

    def pack(self, ours: Tensor) -> list[Tensor]:
        """Published tensors of ours."""

    def unpack(self, theirs: Sequence[Tensor]) -> Tensor:
        """Our tensor of published ones."""


@dataclass(frozen=True)
class Same:
    """The same tensor."""

    def pack(self, ours: Tensor) -> list[Tensor]:
        """[...] -> [...]."""
        return [ours]

    def unpack(self, theirs: Sequence[Tensor]) -> Tensor:
        """[...] -> [...]."""
        return theirs[0]


@dataclass(frozen=True)
class Apart:
    """One published tensor for each expert."""

    def pack(self, ours: Tensor) -> list[Tensor]:
        """[E, ...] -> E x [...]."""
        return list(ours.unbind(0))

    def unpack(self, theirs: Sequence[Tensor]) -> Tensor:
        """E x [...] -> [E, ...]."""
        return torch.stack(list(theirs))


@dataclass(frozen=True)
class OneChannel:
    """Taps of a depthwise convolution, as torch.nn.Conv1d keeps them."""

    def pack(self, ours: Tensor) -> list[Tensor]:
        """[C, W] -> [C, 1, W]."""
        return [ours.unsqueeze(1)]

    def unpack(self, theirs: Sequence[Tensor]) -> Tensor:
        """[C, 1, W] -> [C, W]."""
        return theirs[0].squeeze(1)


@dataclass(frozen=True)
class Broadcast:
    """A value per head, shaped to be broadcast over batch, tokens and channels."""

    def pack(self, ours: Tensor) -> list[Tensor]:
        """[H] -> [1, 1, H, 1]."""
        return [ours.view(1, 1, -1, 1)]

    def unpack(self, theirs: Sequence[Tensor]) -> Tensor:
        """[1, 1, H, 1] -> [H]."""
        return theirs[0].flatten()


@dataclass(frozen=True)
class Padded:
    """A value per head, zeros after them up to a multiple of `multiple`."""

    heads: int
    multiple: int = 128

    def pack(self, ours: Tensor) -> list[Tensor]:
        """[H] -> [H rounded up]."""
        return [F.pad(ours, (0, -self.heads % self.multiple))]

    def unpack(self, theirs: Sequence[Tensor]) -> Tensor:
        """[H rounded up] -> [H]."""
        return theirs[0].flatten()[: self.heads]


@dataclass(frozen=True)
class RowVector:
    """A vector as the weight of a projection to one feature."""

    def pack(self, ours: Tensor) -> list[Tensor]:
        """[D] -> [1, D]."""
        return [ours.unsqueeze(0)]

    def unpack(self, theirs: Sequence[Tensor]) -> Tensor:
        """[1, D] -> [D]."""
        return theirs[0].squeeze(0)


@dataclass(frozen=True)
class OtherHalfFirst:
    """A projection of two joined vectors, which are joined the other way round there."""

    def pack(self, ours: Tensor) -> list[Tensor]:
        """[D, 2 D] -> [D, 2 D]."""
        return [ours.roll(ours.size(1) // 2, 1)]

    def unpack(self, theirs: Sequence[Tensor]) -> Tensor:
        """[D, 2 D] -> [D, 2 D]."""
        return self.pack(theirs[0])[0]


@dataclass(frozen=True)
class InterleavedRotary:
    """Rotary rows in pairs (2i, 2i + 1), where ours are (i, i + R/2); a head's other rows come first."""

    head_rows: int
    rotary_rows: int

    def pack(self, ours: Tensor) -> list[Tensor]:
        """[H * head_rows, ...] -> the same, each head's last `rotary_rows` rows interleaved."""
        kept, turned = self._split(ours)
        pairs = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return [torch.cat((kept, pairs), 1).flatten(0, 1)]

    def unpack(self, theirs: Sequence[Tensor]) -> Tensor:
        """The inverse."""
        kept, pairs = self._split(theirs[0])
        turned = pairs.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return torch.cat((kept, turned), 1).flatten(0, 1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = x.unflatten(0, (-1, self.head_rows))
        return heads[:, : -self.rotary_rows], heads[:, -self.rotary_rows :]
