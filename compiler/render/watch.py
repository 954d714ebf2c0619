"""A snapshot of a run as a panel for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shipway.compiler.render import units

BARS = "▁▂▃▄▅▆▇█"
OVER = 1.1
"""A measured figure beyond the plan's by this factor, in the bad direction, is set off."""


def panel(found: Mapping[str, Any]) -> RenderableType:
    """Everything a person looks for, top to bottom."""
    parts: list[RenderableType] = [_headline(found)]
    progress = found["progress"]
    if progress is None:
        return Group(*parts, Text("no step yet", style="dim"))
    parts += [_where(progress), _loss(found), _figures(found)]
    parts += [Text(line) for line in _plain(found)]
    parts += [Text(line, style="bold yellow") for line in warnings(found)]
    return Group(*parts)


def warnings(found: Mapping[str, Any]) -> list[str]:
    """What a person should act on."""
    lines = []
    progress = found["progress"] or {}
    if progress.get("stalled"):
        since = units.duration(progress["seconds_since_last_step"])
        lines.append(f"no step for {since}: shipway logs -f {found['run']}")
    if found.get("not_finite"):
        lines.append(f"{found['not_finite']} of the recent steps were not finite and left out")
    for entry in found["slow_ranks"]:
        times = f"{entry['times_median']:.2f} times the median"
        lines.append(f"slow device: rank {entry['rank']} on {entry['host']}, {times}")
    return lines


def _headline(found: Mapping[str, Any]) -> Text:
    text = Text.assemble((str(found["run"]), "bold"), f"  {found['state']}")
    if found["attempts"]:
        text.append(f"  {found['attempts']} attempts ended, the last: {found['last_attempt']}", style="dim")
    return text


def _where(progress: Mapping[str, Any]) -> Text:
    done, steps = progress["stage_step"], progress["stage_steps"]
    filled = round(24 * done / steps)
    left = f"  {units.duration(progress['stage_seconds_left'])} left" if done < steps else ""
    return Text.assemble(
        f"stage {progress['stage']}  ",
        ("━" * filled, "green"),
        ("━" * (24 - filled), "dim"),
        f"  {done}/{steps}{left}  {units.count(progress['tokens'])} tokens",
    )


def _loss(found: Mapping[str, Any]) -> Text:
    loss = found["loss"]
    return Text.assemble(
        "loss  ",
        (f"{loss['last']:.4f}", "bold"),
        f"  mean of recent {loss['mean_of_recent']:.4f}  {sparkline(loss['curve'])}",
    )


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text; what is not finite is a gap."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def _figures(found: Mapping[str, Any]) -> Table:
    table = Table("", "measured", "planned", "ratio", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (
        ("step time", "step_seconds", units.duration, True),
        ("tokens per second", "tokens_per_second", units.count, False),
        ("model FLOPs utilisation", "mfu", lambda share: f"{share:.2%}", False),
        ("memory allocated, worst rank", "memory_allocated_bytes", units.gibibytes, True),
        ("memory reserved, worst rank", "memory_reserved_bytes", units.gibibytes, True),
    )
    for name, key, form, high_is_bad in rows:
        figure = found[key]
        if figure["measured"] is None:
            table.add_row(name, "not counted here", form(figure["planned"]), "")
            continue
        ratio = figure["ratio"]
        bad = ratio is not None and (ratio > OVER if high_is_bad else ratio < 1 / OVER)
        cells = (form(figure["measured"]), form(figure["planned"]))
        shown = "" if ratio is None else f"{ratio:.2f}"
        table.add_row(name, *cells, Text(shown, style="yellow" if bad else ""))
    return table


def _plain(found: Mapping[str, Any]) -> list[str]:
    lines = [f"gradient norm {found['gradient_norm']:.3g}  learning rate {found['learning_rate']:.3g}"]
    load = found["expert_load"]
    if load["worst"] is not None:
        lines.append(
            f"expert load, largest over mean: {load['mean']:.2f} on average,"
            f" {load['worst']:.2f} in layer {load['worst_layer']}"
        )
    lines.append(f"waiting for data {found['data_wait_share']:.1%} of the time")
    if found["utilisation"]:
        busy = found["utilisation"]
        lines.append(f"devices busy: median {busy['median']:.0%}, least {busy['least']:.0%}")
    if found["communication"]:
        measured = found["communication"]["measured_seconds_per_step"]
        planned = found["communication"]["planned_seconds_per_step"] or {}
        axes = [
            f"{axis} {units.duration(s)}"
            + (f" (planned {units.duration(planned[axis])})" if axis in planned else "")
            for axis, s in sorted(measured.items())
        ]
        lines.append("communication a step, last profile: " + (", ".join(axes) or "none"))
    if found["evaluation"] and "held_out/all" in found["evaluation"]:
        lines.append(f"held-out loss {found['evaluation']['held_out/all']:.4f}")
    checkpoint = found["checkpoint"]
    lines.append(
        f"last checkpoint: step {checkpoint['step']}, {units.duration(checkpoint['age_seconds'])} ago"
        if checkpoint
        else "no finished checkpoint yet"
    )
    return lines
