"""Numbers as people read them."""

from __future__ import annotations

GIB = 2**30


def gibibytes(size: float) -> str:
    """Memory, as the drivers and torch count it."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def transferred(size: float) -> str:
    """A message's size."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def count(number: float) -> str:
    """A count with its magnitude: 2.78 T, 104.2 B, 64 K."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.4g} {unit}"
    return f"{number:.0f}"


def context(tokens: int) -> str:
    """A context length, in powers of two where it is one."""
    for unit, scale in (("M", 2**20), ("K", 2**10)):
        if tokens >= scale and tokens % scale == 0:
            return f"{tokens // scale}{unit}"
    return str(tokens)


def duration(seconds: float) -> str:
    """A time with a fitting unit."""
    if seconds >= 86400 * 2:
        return f"{seconds / 86400:.1f} days"
    if seconds >= 3600 * 2:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60 * 2:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def money(dollars: float) -> str:
    """US dollars."""
    if dollars >= 1e6:
        return f"${dollars / 1e6:,.1f} M"
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:,.2f}"


def percent(share: float) -> str:
    """A share of one."""
    return f"{100 * share:.1f} %"


def hours(number: float) -> str:
    """Device-hours; a short run keeps a digit that says something."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"
