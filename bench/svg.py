"""Plain SVG charts: scatter, bars, lines. The same numbers give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shipway.runtime.charts import nice_ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 64, 16, 44, 44
BAR, GAP, LABELS = 22, 8, 300
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#64748b")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#334155}.title{font-weight:600;font-size:14px;fill:#0f172a}"
    ".grid{stroke:#e2e8f0}.even{stroke:#94a3b8;stroke-dasharray:4 4}"
)
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """One bar with what stands behind it."""

    label: str
    value: float
    note: str
    colour: str


@dataclass(frozen=True)
class _Axes:
    """Places values in the picture; logarithmic in x where asked."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    logarithmic: bool = False

    def x(self, value: float) -> float:
        low, high, value = (
            (math.log2(v) for v in (*self.x_range, value)) if self.logarithmic else (*self.x_range, value)
        )
        return round(LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)


def scatter(title: str, unit: str, series: Mapping[str, Points]) -> str:
    """Measured against planned, each point an (x planned, y measured), with the line where both are equal."""
    most = max(value for points in series.values() for point in points for value in point) * 1.05
    axes = _Axes((0.0, most), (0.0, most))
    ticks = nice_ticks(0.0, most, 6)
    parts = [*_grid(axes, [(t, f"{t:g}") for t in ticks], ticks)]
    parts.append(_line(axes, [(0.0, 0.0), (most, most)], 'class="even"'))
    for colour, points in zip(COLOURS, series.values(), strict=False):
        parts += [f'<circle cx="{axes.x(x)}" cy="{axes.y(y)}" r="4" fill="{colour}"/>' for x, y in points]
    parts += _legend(series)
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 8, f"planned, {unit}", "end"))
    parts.append(_text(LEFT, TOP - 8, f"measured, {unit}", "middle"))
    return _picture(title, parts, HEIGHT)


def lines(title: str, unit: str, series: Mapping[str, Points]) -> str:
    """Curves over context lengths, which double from tick to tick; y begins at zero."""
    everything = [point for points in series.values() for point in points]
    lengths = sorted({x for x, _ in everything})
    most = max(y for _, y in everything) * 1.1
    axes = _Axes((lengths[0], lengths[-1]), (0.0, most), logarithmic=True)
    parts = [*_grid(axes, [(x, _length(x)) for x in lengths], nice_ticks(0.0, most, 5))]
    for colour, points in zip(COLOURS, series.values(), strict=False):
        parts.append(_line(axes, points, f'stroke="{colour}" stroke-width="2"'))
        parts += [f'<circle cx="{axes.x(x)}" cy="{axes.y(y)}" r="3" fill="{colour}"/>' for x, y in points]
    parts += _legend(series)
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 8, "tokens of context", "end"))
    parts.append(_text(LEFT, TOP - 8, unit, "middle"))
    return _picture(title, parts, HEIGHT)


def bars(title: str, groups: Mapping[str, Sequence[Bar]]) -> str:
    """Horizontal bars in named groups, each with its note behind it."""
    most = max(bar.value for group in groups.values() for bar in group)
    scale = (WIDTH - LABELS - 190) / most
    parts, y = [], TOP
    for name, group in groups.items():
        parts.append(_text(16, y + 14, name, "start", ' font-weight="600"'))
        y += BAR
        for bar in group:
            length = round(bar.value * scale, 1)
            parts.append(_text(LABELS - 8, y + 15, bar.label, "end"))
            parts.append(f'<rect x="{LABELS}" y="{y}" width="{length}" height="{BAR}" fill="{bar.colour}"/>')
            parts.append(_text(LABELS + length + 6, y + 15, bar.note, "start"))
            y += BAR + GAP
        y += GAP
    return _picture(title, parts, y)


def _grid(axes: _Axes, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[float]) -> list[str]:
    parts = []
    for tick in y_ticks:
        y = axes.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    parts += [_text(axes.x(at), HEIGHT - BOTTOM + 16, label, "middle") for at, label in x_ticks]
    return parts


def _legend(series: Mapping[str, Points]) -> list[str]:
    parts, x = [], LEFT + 130
    for colour, name in zip(COLOURS, series, strict=False):
        parts.append(f'<rect x="{x}" y="{TOP - 17}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 15, TOP - 8, name, "start"))
        x += 30 + 7 * len(name)
    return parts


def _line(axes: _Axes, points: Points, look: str) -> str:
    return (
        f'<polyline fill="none" {look} points="{" ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in points)}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{round(x, 1)}" y="{round(y, 1)}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _length(tokens: float) -> str:
    return f"{tokens / 2**20:g}M" if tokens >= 2**20 else f"{tokens / 2**10:g}K"


def _picture(title: str, parts: Sequence[str], height: float) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
            f' aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            f'<text class="title" x="16" y="20">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )
