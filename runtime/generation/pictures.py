"""Pictures in prompts: a picture's tokens come first, then the prompt's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shipway.runtime.data.patches import ImageFormat, Patches, patchify
from shipway.runtime.data.sources.image_folder import as_pixels
from shipway.runtime.exit_codes import Fatal
from shipway.schemas.training import ImagesSource

LARGEST_TOKENS: int = ImagesSource.model_fields["largest_tokens"].default
"""Larger pictures are scaled down, as a folder of pictures in training is by default."""


@dataclass(frozen=True)
class Pictures:
    """One picture for each prompt."""

    patches: tuple[Patches, ...]
    image: ImageFormat

    def placeholders(self, index: int) -> list[int]:
        """Tokens of a picture, which stand before its prompt."""
        patches, merge = self.patches[index], self.image.merge
        return [self.image.token] * (patches.rows * patches.columns // merge**2)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Patches and grids as the generated model takes them."""
        values = torch.from_numpy(np.concatenate([patches.values for patches in self.patches]))
        grids = torch.tensor([(patches.rows, patches.columns) for patches in self.patches])
        return values.to(device), grids.to(device)


def read_pictures(paths: Sequence[Path], image: ImageFormat) -> Pictures:
    """PNG, JPEG or what else Pillow knows; raises Fatal for a file that is no picture."""
    return Pictures(tuple(_read(path, image) for path in paths), image)


def _read(path: Path, image: ImageFormat) -> Patches:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            height, width = image.fitted(picture.height, picture.width, LARGEST_TOKENS)
            return patchify(as_pixels(picture, height, width), image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Fatal(f"{path} is not a readable picture: {error}") from error
