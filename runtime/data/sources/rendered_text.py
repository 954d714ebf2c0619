"""Pictures of words, made as they are read: data for a vision tower where nothing can be downloaded."""

from __future__ import annotations

import numpy as np

from shipway.runtime.data.patches import Pixels
from shipway.runtime.data.permutation import derive_key

_WORDS = tuple(
    word
    for line in (
        "anchor bay beacon berth bow bridge buoy cabin canal cargo channel chart compass crane crew",
        "current deck dock drift ferry fleet float fog galley gale harbour haven helm hull island",
        "jetty keel knot ladder lagoon latch light load lock log mast mooring navy north oar ocean",
        "pier pilot port quay raft reef rope rudder sail shore signal sloop south spar stern storm",
        "strait tack tide tug vessel voyage wave wharf",
    )
    for word in line.split()
)
_SCALES = (1, 2)
_MARGIN = 3
# Pillow's bitmap font is of one width and height for all of ASCII.
_GLYPH_WIDTH, _GLYPH_HEIGHT = 6, 11


class RenderedText:
    """`count` pictures of up to `lines` lines of up to `words` words, with the words as caption.

    Each has a size of its own.
    """

    def __init__(self, count: int, seed: int, lines: int = 4, words: int = 3) -> None:
        self.count = count
        self.fingerprint = f"rendered text {count} {seed} {lines} {words}"
        self._seed = seed
        self._most_lines = lines
        self._most_words = words

    def caption(self, index: int) -> str:
        """The words, a line per line."""
        return "\n".join(self._lines(index))

    def size(self, index: int) -> tuple[int, int]:
        """Known from the text alone."""
        lines = self._lines(index)
        scale = _SCALES[index % len(_SCALES)]
        width = max(len(line) for line in lines) * _GLYPH_WIDTH + 2 * _MARGIN
        return (len(lines) * _GLYPH_HEIGHT + 2 * _MARGIN) * scale, width * scale

    def pixels(self, index: int, height: int, width: int) -> Pixels:
        """Drawn with Pillow's built-in bitmap font, which no installation changes."""
        from PIL import Image, ImageDraw, ImageFont

        own_height, own_width = self.size(index)
        scale = _SCALES[index % len(_SCALES)]
        shade = int(self._generator(index, "shade").integers(160, 256))
        picture = Image.new("L", (own_width // scale, own_height // scale), shade)
        draw, font = ImageDraw.Draw(picture), ImageFont.load_default_imagefont()
        for number, line in enumerate(self._lines(index)):
            draw.text((_MARGIN, _MARGIN + number * _GLYPH_HEIGHT), line, fill=0, font=font)
        picture = picture.resize((width, height), Image.Resampling.NEAREST)
        return np.repeat(np.asarray(picture, dtype=np.uint8)[:, :, None], 3, axis=2)

    def _lines(self, index: int) -> list[str]:
        generator = self._generator(index, "text")
        sizes = generator.integers(1, self._most_words + 1, size=generator.integers(1, self._most_lines + 1))
        return [" ".join(_WORDS[i] for i in generator.integers(len(_WORDS), size=size)) for size in sizes]

    def _generator(self, index: int, purpose: str) -> np.random.Generator:
        return np.random.default_rng(derive_key("rendered text", self._seed, index, purpose))
