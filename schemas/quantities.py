"""Human quantities, normalised to one unit each: counts, bytes, rates, fractions, durations.

`8K` is 8,000 and `8Ki` is 8,192 everywhere except in a context length, where the field has always
meant powers of two: there `8K` is 8,192 and `1M` is 1,048,576.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

_DECIMAL: Mapping[str, int] = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_DECIMAL_PREFIX: Mapping[str, int] = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY: Mapping[str, int] = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SECONDS: Mapping[str, float] = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_NUMBER = re.compile(r"^\s*([+-]?\d+(?:[_,]?\d+)*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z%/$]*)\s*$")


def _scaled(value: object, units: Mapping[str, float], what: str, examples: str) -> float:
    """`value` in base units; raises ValueError in the user's words when it cannot be read."""
    if isinstance(value, bool):
        raise ValueError(f"expected {what}, not true or false; for example {examples}")
    if isinstance(value, (int, float)):
        if not math.isfinite(value):
            raise ValueError(f"expected {what} that is finite; for example {examples}")
        return value
    match = _NUMBER.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"expected {what}; for example {examples}")
    digits, unit = match.groups()
    if unit not in units:
        known = ", ".join(u for u in units if u)
        raise ValueError(f"{unit!r} is not a unit of {what} (known: {known}); for example {examples}")
    text = digits.replace("_", "").replace(",", "")
    scale = units[unit]
    # Exact integers stay exact: 2.8T must not pick up a float's rounding.
    if isinstance(scale, int) and not re.search(r"[eE]", text):
        whole, _, fraction = text.partition(".")
        numerator = int(whole + fraction) * scale
        denominator: int = 10 ** len(fraction)
        return numerator // denominator if numerator % denominator == 0 else numerator / denominator
    return float(text) * scale


def _whole(parse: Callable[[object], float], what: str) -> Callable[[object], int]:
    def convert(value: object) -> int:
        number = parse(value)
        if number != int(number):
            raise ValueError(f"expected a whole number of {what}, got {number:g}")
        return int(number)

    return convert


def parse_count(value: object) -> float:
    """A count such as 2.8T, 64Ki or 1_000 (K, M, G or B, T are decimal; Ki, Mi, Gi, Ti binary)."""
    return _scaled(value, {**_DECIMAL, **_BINARY}, "a count", "4096, 64Ki, 2.8T")


def parse_context(value: object) -> float:
    """A context length in tokens; K and M are powers of two here, as the field uses them."""
    units = {"": 1, "K": 2**10, "M": 2**20, "Ki": 2**10, "Mi": 2**20}
    return _scaled(value, units, "a context length in tokens", "8K (8,192), 65536, 1M")


def parse_bytes(value: object) -> float:
    """A size in bytes: 141GB, 80GiB, 512KB."""
    units: dict[str, float] = {f"{p}B": s for p, s in _DECIMAL_PREFIX.items()}
    units |= {f"{p}B": s for p, s in _BINARY.items()}
    size = _scaled(value, {"": 1, **units}, "a size in bytes", "141GB, 80GiB")
    # 79.1GiB is no whole number of bytes, and nobody means the fraction.
    return round(size) if size >= 1000 else size


def parse_bytes_per_second(value: object) -> float:
    """A bandwidth in bytes per second; 400Gb/s are bits, 50GB/s are bytes."""
    units: dict[str, float] = {f"{p}B/s": s for p, s in _DECIMAL_PREFIX.items()}
    units |= {f"{p}B/s": s for p, s in _BINARY.items()}
    units |= {f"{p}b/s": s / 8 for p, s in _DECIMAL_PREFIX.items()}
    return float(_scaled(value, {"": 1, **units}, "a bandwidth", "400Gb/s, 50GB/s, 4.8TB/s"))


def parse_flops_per_second(value: object) -> float:
    """An arithmetic rate in FLOP/s: 989TFLOP/s."""
    units: dict[str, float] = {f"{p}FLOP/s": s for p, s in _DECIMAL_PREFIX.items()}
    units |= {f"{p}FLOPS": s for p, s in _DECIMAL_PREFIX.items()}
    return float(_scaled(value, {"": 1, **units}, "an arithmetic rate", "989TFLOP/s"))


def parse_seconds(value: object) -> float:
    """A duration in seconds: 5us, 30min, 2h."""
    return float(_scaled(value, {"": 1.0, **_SECONDS}, "a duration", "5us, 30min, 2h"))


def parse_fraction(value: object) -> float:
    """A fraction of one: 0.01 or 1%."""
    return float(_scaled(value, {"": 1.0, "%": 0.01}, "a fraction", "0.01, 1%"))


def parse_ratio(value: object) -> float:
    """A ratio of at least one, such as an oversubscription of 3:1."""
    if isinstance(value, str) and ":" in value:
        left, _, right = value.partition(":")
        try:
            return float(left) / float(right)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"expected a ratio such as 3:1, got {value!r}") from None
    return float(_scaled(value, {"": 1.0}, "a ratio", "3:1, 1.5"))


def _schema(kind: str, example: str) -> Any:
    return WithJsonSchema({"anyOf": [{"type": kind}, {"type": "string", "examples": [example]}]})


Count = Annotated[int, BeforeValidator(_whole(parse_count, "units")), Field(ge=0), _schema("integer", "64Ki")]
PositiveCount = Annotated[
    int, BeforeValidator(_whole(parse_count, "units")), Field(ge=1), _schema("integer", "64Ki")
]
ContextTokens = Annotated[
    int, BeforeValidator(_whole(parse_context, "tokens")), Field(ge=1), _schema("integer", "8K")
]
Bytes = Annotated[
    int, BeforeValidator(_whole(parse_bytes, "bytes")), Field(ge=0), _schema("integer", "141GB")
]
BytesPerSecond = Annotated[
    float, BeforeValidator(parse_bytes_per_second), Field(gt=0), _schema("number", "400Gb/s")
]
FlopsPerSecond = Annotated[
    float, BeforeValidator(parse_flops_per_second), Field(gt=0), _schema("number", "989TFLOP/s")
]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0), _schema("number", "5us")]
Fraction = Annotated[float, BeforeValidator(parse_fraction), Field(ge=0, le=1), _schema("number", "1%")]
Ratio = Annotated[float, BeforeValidator(parse_ratio), Field(ge=1), _schema("number", "3:1")]
