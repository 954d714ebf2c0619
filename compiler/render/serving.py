"""Serving capacity for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shipway.compiler.render import units
from shipway.schemas.serving import Serving, ServingFormat, ServingLayout

COLUMNS = ("context", "a request", "requests", "first token", "per token alone", "per token full", "tokens/s")


def render_serving(serving: Serving) -> RenderableType:
    """Weights, state of a request, and the layouts of each number format."""
    state = serving.state
    parts: list[RenderableType] = [
        Text.assemble(
            (f"Serving {serving.name}", "bold"),
            f" on {serving.devices:,} x {serving.device}: {units.count(serving.total_parameters)} parameters"
            f" in memory, {units.count(serving.active_parameters)} computed for a token",
        ),
        Text(f"times from: {serving.calibration}", style="dim"),
        Text(
            f"A request keeps {state.cache_bytes_per_token:,} B a token in {state.cache_layers} layers, in"
            f" pages of {state.page_tokens} tokens ({units.transferred(state.page_bytes)})"
            + (
                f", and {units.transferred(state.constant_bytes)} that does not grow in"
                f" {state.constant_layers} layers."
                if state.constant_bytes
                else "."
            )
        ),
    ]
    for form in serving.formats:
        parts += [Text(), *_format(form, serving.trained_context_tokens)]
    parts += [Text(), *(Text(line, style="dim") for line in _notes(serving))]
    return Group(*parts)


def _format(form: ServingFormat, trained: int) -> Iterable[RenderableType]:
    weights = form.weights
    yield Text.assemble(
        (weights.format, "bold"),
        f": {_gigabytes(weights.bytes)} of weights, {_gigabytes(weights.bytes_per_token)} read"
        f" for a token alone ({weights.note})",
    )
    if not form.layouts:
        yield Text(form.note, style="bold red")
    for layout in form.layouts:
        yield Text(_words(layout))
        yield _points(layout, trained)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else units.transferred(size)


def _words(layout: ServingLayout) -> str:
    axes = (
        ("TP", layout.tensor_parallel),
        ("DP", layout.data_parallel),
        ("EP", layout.expert_parallel),
        ("PP", layout.pipeline_parallel),
    )
    name = " ".join(f"{axis}{degree}" for axis, degree in axes if degree > 1) or "one device"
    return (
        f"{layout.devices} devices a group ({layout.groups:,} groups), {name}: fullest device"
        f" {units.gibibytes(layout.weight_bytes)} weights, {units.gibibytes(layout.state_bytes)} for requests"
    )


def _points(layout: ServingLayout, trained: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True, header_style="bold")
    for point in layout.points:
        beyond = "*" if point.context_tokens > trained else ""
        full = units.duration(point.decode_seconds_full) if point.requests else "-"
        table.add_row(
            units.context(point.context_tokens) + beyond,
            units.transferred(point.request_bytes),
            f"{point.requests:,}" if point.requests else Text("none", style="red"),
            units.duration(point.prefill_seconds),
            units.duration(point.decode_seconds),
            full,
            units.count(point.tokens_per_second),
        )
    return table


def _notes(serving: Serving) -> Iterable[str]:
    if any(
        point.context_tokens > serving.trained_context_tokens
        for form in serving.formats
        for layout in form.layouts
        for point in layout.points
    ):
        longest = units.context(serving.trained_context_tokens)
        yield f"* longer than the {longest} tokens that the blueprint's stages train"
    yield from serving.assumptions
