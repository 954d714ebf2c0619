"""Sentences that never part a number from its unit."""

from __future__ import annotations

import re

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_GLUED = re.compile(r"(?<=\d) (?=[^\W\d])")
_GLUE = "\ue000"
"""Stands for such a space while lines are wrapped: a character that is no space to rich."""


class Sentence:
    """Text that wraps between words, but not inside of `1.1 GiB`."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines of at most the console's width."""
        glued = self.text.copy()
        glued.plain = _GLUED.sub(_GLUE, glued.plain)
        for line in glued.wrap(console, options.max_width):
            line.plain = line.plain.replace(_GLUE, " ")
            yield line
