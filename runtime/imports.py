"""How programs import torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import without collections of garbage, and leave what is there out of later ones.

    torch makes a million objects, none of them garbage: to look through them again and again is a fifth of a
    program's start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
