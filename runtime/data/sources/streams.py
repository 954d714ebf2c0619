"""The streams of a stage's sources, and what all their rows share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shipway.runtime.data.documents import Documents
from shipway.runtime.data.errors import DataError
from shipway.runtime.data.interleave import InterleavedStream
from shipway.runtime.data.patches import ImageFormat
from shipway.runtime.data.sources.open import open_images, open_source
from shipway.runtime.data.stream import SourceStream, Split
from shipway.runtime.data.tokenizers import Tokenizer, make_tokenizer
from shipway.runtime.data.whole_stream import WholeDocumentStream
from shipway.schemas.model import Model
from shipway.schemas.training import Data, ImagesSource, RenderedTextSource


@dataclass(frozen=True)
class Sources:
    """Opened sources."""

    streams: Mapping[str, SourceStream]
    padding: int
    """Token that fills rows."""
    image: ImageFormat | None = None
    """How images are cut; None where no source has any."""


def open_sources(
    data: Data,
    weights: Mapping[str, float],
    seed: int,
    folder: Path,
    split: Split,
    model: Model | None = None,
) -> Sources:
    """A stream for every source of positive weight, at its beginning.

    `model` is needed for sources with images, and to check that its vocabulary holds the
    tokenizer's. Raises DataError.
    """
    tokenizer = make_tokenizer(data.tokenizer, folder)
    if model is not None and tokenizer.vocabulary > model.vocabulary:
        raise DataError(
            f"the tokenizer has {tokenizer.vocabulary} tokens and the model's vocabulary {model.vocabulary};"
            f" set model.vocabulary to at least {tokenizer.vocabulary}"
        )
    streams: dict[str, SourceStream] = {}
    image: ImageFormat | None = None
    for name, weight in weights.items():
        source = data.sources[name]
        if weight <= 0:
            continue
        if isinstance(source, (ImagesSource, RenderedTextSource)):
            image = image_format(f"data source {name!r}", model, tokenizer)
            pictures = open_images(name, source, tokenizer, image, folder)
            streams[name] = WholeDocumentStream(name, pictures, seed, split, data.corrupt_limit)
        else:
            documents = open_source(name, source, tokenizer, folder)
            streams[name] = make_stream(name, documents, seed, split, data.corrupt_limit, data.interleave)
    return Sources(streams, tokenizer.padding, image)


def make_stream(
    name: str, documents: Documents, seed: int, split: Split, corrupt_limit: float, interleave: int
) -> SourceStream:
    """One document after the other, or several side by side."""
    if interleave == 1:
        return SourceStream(name, documents, seed, split, corrupt_limit)
    return InterleavedStream(name, documents, seed, split, corrupt_limit, interleave)


def image_format(giver: str, model: Model | None, tokenizer: Tokenizer) -> ImageFormat:
    """How `model` sees the images that `giver` has; raises DataError when it cannot."""
    if model is None or model.vision is None:
        raise DataError(f"{giver} has images, and the model has no `vision` to see them")
    vision = model.vision
    token = model.vocabulary - 1 if vision.image_token is None else vision.image_token
    if token < tokenizer.vocabulary:
        raise DataError(
            f"the image token {token} is a token of text too; set model.vocabulary above"
            f" {tokenizer.vocabulary}, or model.vision.image_token to an id that text does not use"
        )
    return ImageFormat(vision.patch, vision.merge, token)
