"""Draws what bench/results holds into docs/pictures.

    python -m bench.plot

Plain SVG, the same bytes for the same results, so that a picture changes only where a measurement did.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.svg import COLOURS, Bar, Points, bars, lines, scatter

ROOT = Path(__file__).parents[1]
RESULTS, PICTURES = ROOT / "bench" / "results", ROOT / "docs" / "pictures"
GIB = 2**30
KINDS = ("shipway", "flash-linear-attention", "transformers")
WORDS = {"master": "fp32 masters", "bf16": "all bf16"}


def main() -> int:
    """Draw every picture that there are results for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PICTURES)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in pictures(options.results).items():
        (options.out / name).write_text(text, encoding="utf-8")
        print(options.out / name)
    return 0


def pictures(results: Path) -> dict[str, str]:
    """Every picture by file name; none for what was not measured."""
    drawn: dict[str, str] = {}
    campaigns = [json.loads(path.read_text()) for path in sorted(results.glob("h200-verify-*.json"))]
    titles = (("allocated", "GiB", "Peak memory allocated"), ("step", "s", "One optimizer step"))
    for total, unit, title in titles:
        series = planned_and_measured(campaigns, total, GIB if unit == "GiB" else 1.0)
        if series:
            drawn[f"planned-{total}.svg"] = scatter(f"{title}: planned and measured", unit, series)
    rows = latest(_rows(results / "h200-throughput.json"))
    trained = [row for row in rows if "tokens_per_second" in row]
    if trained:
        drawn["throughput.svg"] = bars("Tokens per second on one H200", by_case(trained))
    costs = cost_by_context(rows, _rows(results / "h200-decay.json"))
    if costs:
        drawn["cost-by-context.svg"] = lines("Delta attention, forward and backward", "ns a token", costs)
    return drawn


def planned_and_measured(campaigns: Iterable[dict[str, Any]], total: str, unit: float) -> dict[str, Points]:
    """(planned, measured) of a campaign's cases, by what is said of the campaign."""
    series: dict[str, list[tuple[float, float]]] = {}
    for campaign in campaigns:
        for case in campaign["cases"]:
            for term in case["totals"]:
                if term["name"] == total and term["measured"]:
                    points = series.setdefault(_campaign(campaign), [])
                    points.append((term["planned"] / unit, term["measured"] / unit))
    return dict(series)


def _campaign(campaign: dict[str, Any]) -> str:
    words = str(campaign.get("command", "")).split()
    seed = words[words.index("--seed") + 1] if "--seed" in words else "?"
    near = ", near the limit" if "--near-limit" in words else ""
    return f"seed {seed}{near}"


def latest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row that was measured of each name, in the order of the names' first rows."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["outcome"] == "measured":
            found[row["name"]] = row
    return list(found.values())


def by_case(rows: Sequence[dict[str, Any]]) -> dict[str, list[Bar]]:
    """Bars by case, the fastest first, with memory and MFU behind each."""
    groups: dict[str, list[Bar]] = {}
    for row in sorted(rows, key=lambda row: -row["tokens_per_second"]):
        words = [row["kind"], WORDS[row["states"]], *([row["variant"]] if row["variant"] else [])]
        note = (
            f"{row['tokens_per_second']:,.0f}, {row['allocated_bytes'] / GIB:.1f} GiB, MFU {row['mfu']:.0%}"
        )
        bar = Bar(", ".join(words), row["tokens_per_second"], note, COLOURS[KINDS.index(row["kind"])])
        groups.setdefault(row["case"], []).append(bar)
    return dict(sorted(groups.items()))


def cost_by_context(
    throughput: Iterable[dict[str, Any]], decay: Iterable[dict[str, Any]]
) -> dict[str, Points]:
    """Nanoseconds a token by context: of a whole delta-attention block, and of its kernel by gate."""
    series: dict[str, Points] = {}
    kernel = list(decay)
    for row in throughput:
        if row["kind"] == "delta layer":
            series["block, 16 heads"] = [(r["context_tokens"], r["per_token"] * 1e9) for r in row["lengths"]]
        if row["kind"] == "delta kernel":
            kernel = row["lengths"]
    for gate in ("bounded", "unbounded") if kernel else ():
        series[f"kernel, {kernel[0]['heads']} heads, {gate}"] = [
            (r["tokens"], (r[f"{gate}_forward_seconds"] + r[f"{gate}_backward_seconds"]) / r["tokens"] * 1e9)
            for r in kernel
        ]
    return series


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
