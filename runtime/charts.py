"""Line charts as numbers for an inline SVG: a page that opens anywhere needs no scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 260, 52, 8, 8, 22
MOST_POINTS = 1200
"""Longer curves are thinned: a screen has no more columns."""


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Dot:
    """A single measurement."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Curve:
    """A polyline."""

    points: str


@dataclass(frozen=True)
class Chart:
    """Everything the template draws."""

    title: str
    curves: tuple[Curve, ...]
    legend: tuple[str, ...]
    dots: tuple[Dot, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    stages: tuple[Tick, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT


Points = Sequence[tuple[float, float]]


def make_chart(
    title: str,
    curves: Mapping[str, Points],
    stages: Mapping[str, float],
    dots: Points = (),
    dots_name: str = "",
) -> Chart | None:
    """A chart of curves by name; `stages` marks where each begins. None without a finite point."""
    everything = [p for points in (*curves.values(), dots) for p in points if math.isfinite(p[1])]
    if not everything:
        return None
    x_low, x_high = _range([x for x, _ in everything])
    y_low, y_high = _range([y for _, y in everything])

    def x_at(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def y_at(y: float) -> float:
        return round(TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    def polyline(points: Points) -> Curve:
        kept = [p for p in thin(points) if math.isfinite(p[1])]
        return Curve(" ".join(f"{x_at(x)},{y_at(y)}" for x, y in kept))

    return Chart(
        title=title,
        curves=tuple(polyline(points) for points in curves.values()),
        legend=(*curves, *((dots_name,) if dots else ())),
        dots=tuple(Dot(x_at(x), y_at(y), f"{y:.4f} after step {x:.0f}") for x, y in dots if math.isfinite(y)),
        x_ticks=tuple(Tick(x_at(x), f"{x:,.0f}") for x in nice_ticks(x_low, x_high, 8)),
        y_ticks=tuple(Tick(y_at(y), f"{y:g}") for y in nice_ticks(y_low, y_high, 5)),
        stages=tuple(Tick(x_at(x), name) for name, x in stages.items()),
    )


def thin(points: Points) -> Points:
    """At most MOST_POINTS of the points, the last among them."""
    stride = -(-len(points) // MOST_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between `low` and `high`, about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [round(index * step, 10) for index in range(first, math.floor(high / step) + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or max(abs(high) * 0.05, 0.5)
    return low - margin, high + margin
