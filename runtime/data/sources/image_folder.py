"""A folder of PNG and JPEG pictures, with captions in `captions.jsonl` or in a .txt beside each."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import numpy as np

from shipway.runtime.data.errors import CorruptRecord, DataError
from shipway.runtime.data.patches import Pixels
from shipway.runtime.data.storage import File, Storage, fingerprint

if TYPE_CHECKING:
    from PIL import Image

_SUFFIXES = (".png", ".jpg", ".jpeg")
_CAPTIONS = "captions.jsonl"
_HEADER_BYTES = 64 * 2**10


class ImageFolder:
    """Pictures below a folder, sorted by name.

    `captions.jsonl` at the folder's top has one {"file": relative path, "caption": text} per line;
    a picture that it does not name needs a file of its own name ending in .txt.
    """

    def __init__(self, storage: Storage, root: str) -> None:
        files = storage.list(root)
        self._storage = storage
        self._texts = {file.name: file for file in files if file.name.endswith(".txt")}
        self._pictures = [file for file in files if file.name.lower().endswith(_SUFFIXES)]
        if not self._pictures:
            raise DataError(f"{root} holds no {', '.join(_SUFFIXES)} file")
        listed = [file for file in files if file.name == _CAPTIONS]
        self._captions = _read_captions(storage, listed[0]) if listed else {}
        self.count = len(self._pictures)
        self.fingerprint = fingerprint([*self._pictures, *listed, *self._texts.values()], "images")

    def size(self, index: int) -> tuple[int, int]:
        """From the picture's header."""
        picture = self._open(index, _HEADER_BYTES)
        return picture.height, picture.width

    def caption(self, index: int) -> str:
        """From the list, or the text file beside the picture."""
        file = self._pictures[index]
        if file.name in self._captions:
            return self._captions[file.name]
        text = self._texts.get(file.name.rsplit(".", 1)[0] + ".txt")
        if text is None:
            raise CorruptRecord(file.path, f"no caption in {_CAPTIONS}, and no .txt beside it")
        try:
            return self._storage.read(text.path, 0, text.size_bytes).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CorruptRecord(text.path, str(error)) from error

    def pixels(self, index: int, height: int, width: int) -> Pixels:
        """Decoded as RGB; transparency is laid on white."""
        file = self._pictures[index]
        try:
            return as_pixels(self._open(index, file.size_bytes), height, width)
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for damaged data
            raise CorruptRecord(file.path, f"damaged picture: {error}") from error

    def _open(self, index: int, size_bytes: int) -> Image.Image:
        from PIL import Image

        file = self._pictures[index]
        try:
            content = self._storage.read(file.path, 0, min(size_bytes, file.size_bytes))
            return Image.open(io.BytesIO(content))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            if size_bytes < file.size_bytes:  # a header beyond the first part, as large metadata makes it
                return self._open(index, file.size_bytes)
            raise CorruptRecord(file.path, f"not a readable picture: {error}") from error


def as_pixels(picture: Image.Image, height: int, width: int) -> Pixels:
    """A picture as RGB, scaled if that is not its own size; transparency is laid on white."""
    from PIL import Image

    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    flat = Image.alpha_composite(white, picture).convert("RGB")
    if flat.size != (width, height):
        flat = flat.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(flat, dtype=np.uint8)


def _read_captions(storage: Storage, file: File) -> dict[str, str]:
    captions = {}
    for number, line in enumerate(storage.read(file.path, 0, file.size_bytes).splitlines(), start=1):
        try:
            record = json.loads(line)
            captions[str(record["file"])] = str(record["caption"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{file.path}:{number} is not of the form {{"file": "a.png", "caption": "..."}}: {error}'
            ) from error
    return captions
