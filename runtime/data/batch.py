"""What the trainer receives: rows as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shipway.runtime.data.packing import IGNORED, Row, Sample, boundaries, row_hash
from shipway.runtime.data.patches import ImageFormat, blank


@dataclass(frozen=True)
class Images:
    """The images of a batch, in the order of their places in the tokens."""

    patches: Tensor
    """[P, 3 * patch * patch] fp32: of all images, each row by row, channels first within a patch."""
    grids: Tensor
    """[n, 2] int64: rows and columns of patches of each image."""
    token: int
    """Token that stands where an image's embeddings go."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank; b rows of T tokens."""

    tokens: Tensor
    """[b, T] int64."""
    labels: Tensor
    """[b, T] int64; -100 where the next token belongs to another document."""
    cu_seqlens: Tensor
    """[n + 1] int32: document boundaries over the flattened b * T tokens; every row starts a document."""
    samples: tuple[Sample, ...] = ()
    """Where each of the n documents came from."""
    token_hash: int = 0
    """Sum of the rows' hashes, as a signed 64-bit integer; sums over ranks may wrap."""
    images: Images | None = None
    image_index: Tensor | None = None
    """[m] int64, under context parallel: which of the images' embeddings this rank's tokens stand for."""

    @property
    def bounds(self) -> Tensor | None:
        """What a model must know of the documents: nothing where every row is one of them."""
        return None if len(self.cu_seqlens) == len(self.tokens) + 1 else self.cu_seqlens

    @property
    def valid_tokens(self) -> int:
        """Tokens whose label counts."""
        return int((self.labels != IGNORED).sum())

    @property
    def image_arguments(self) -> dict[str, tuple[Tensor, ...]]:
        """Keyword arguments of a generated model that sees images; none where the stage has no images.

        Under context parallel `image_index` goes with them, for `parallel.pictures`.
        """
        if self.images is None:
            return {}
        images = self.images.patches, self.images.grids
        return {"images": images if self.image_index is None else (*images, self.image_index)}

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The same batch on a device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which copies to a GPU do not block."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        images = self.images
        if images is not None:
            images = replace(images, patches=change(images.patches), grids=change(images.grids))
        return replace(
            self,
            tokens=change(self.tokens),
            labels=change(self.labels),
            cu_seqlens=change(self.cu_seqlens),
            images=images,
            image_index=None if self.image_index is None else change(self.image_index),
        )


def make_batch(rows: list[Row], numbers: list[int], image: ImageFormat | None = None) -> Batch:
    """A batch of rows with their global numbers within the stage.

    With `image` the batch always has images, if only a blank one that no token stands for: every
    rank must run the vision tower in every micro-batch, or sharded weights would wait for ever.
    """
    total = sum(row_hash(row, number) for row, number in zip(rows, numbers, strict=True))
    return Batch(
        tokens=torch.from_numpy(np.stack([row.tokens for row in rows])),
        labels=torch.from_numpy(np.stack([row.labels for row in rows])),
        cu_seqlens=torch.from_numpy(boundaries(rows)),
        samples=tuple(sample for row in rows for sample in row.samples),
        token_hash=signed(total),
        images=None if image is None else _images(rows, image),
    )


def _images(rows: list[Row], image: ImageFormat) -> Images:
    pictures = [picture for row in rows for picture in row.pictures]
    pictures = pictures or [blank(image.merge, image.merge, image)]
    return Images(
        patches=torch.from_numpy(np.concatenate([picture.values for picture in pictures])),
        grids=torch.tensor([(picture.rows, picture.columns) for picture in pictures]),
        token=image.token,
    )


def signed(value: int) -> int:
    """`value` modulo 2^64 as a signed integer, which is what an int64 tensor holds."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
