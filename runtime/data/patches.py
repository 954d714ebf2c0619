"""From pixels to what the vision tower takes: patches at the image's own resolution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class ImageFormat:
    """How the model sees images."""

    patch: int
    """Side of a patch in pixels."""
    merge: int
    """Side of the square of patches that becomes one token."""
    token: int
    """Token id that stands where an image's embeddings go."""

    @property
    def cell(self) -> int:
        """Side of what one token sees, in pixels."""
        return self.patch * self.merge

    def tokens(self, height: int, width: int) -> int:
        """Tokens of an image of height x width pixels: ceil(h / cell) * ceil(w / cell)."""
        return -(-height // self.cell) * -(-width // self.cell)

    def fitted(self, height: int, width: int, largest: int) -> tuple[int, int]:
        """The size to scale to, keeping the aspect, so that an image takes at most `largest` tokens."""
        scale = min(1.0, (largest * self.cell**2 / (height * width)) ** 0.5)
        while True:
            size = max(1, round(height * scale)), max(1, round(width * scale))
            if self.tokens(*size) <= largest:
                return size
            # Rounding up to whole cells may go over, most of all for long thin images.
            scale *= 0.98


@dataclass(frozen=True)
class Patches:
    """One image."""

    values: NDArray[np.float32]
    """[rows * columns, 3 * patch * patch]: row by row, channels first within a patch; -1 to 1."""
    rows: int
    columns: int


def patchify(pixels: Pixels, image: ImageFormat) -> Patches:
    """Cut pixels [h, w, 3] into patches; the last column and row are repeated up to whole cells."""
    height, width, _ = pixels.shape
    cell, patch = image.cell, image.patch
    padded = np.pad(pixels, ((0, -height % cell), (0, -width % cell), (0, 0)), mode="edge")
    rows, columns = padded.shape[0] // patch, padded.shape[1] // patch
    cut = padded.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    values = cut.reshape(rows * columns, 3 * patch * patch).astype(np.float32)
    return Patches(values / 127.5 - 1.0, rows, columns)


def blank(rows: int, columns: int, image: ImageFormat) -> Patches:
    """A grey image of rows x columns patches."""
    return Patches(np.zeros((rows * columns, 3 * image.patch**2), dtype=np.float32), rows, columns)
