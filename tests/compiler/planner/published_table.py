"""Our figures beside published ones as docs/published.md shows them.

`python -m tests.compiler.planner.published_table` prints the tables anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shipway.compiler.evaluate import time_breakdown
from shipway.compiler.search import verdict
from tests.compiler.planner.published import AUTOMODEL, H100, SIMUMAX, TORCHTITAN, VTRAIN, Run

PAGE = Path(__file__).parents[3] / "docs" / "published.md"
GIB = 2**30
FLOPS = (("qwen3_30b_a3b", 4096, 23.0), ("kimi_k2", 4096, 204.5), ("llama31_405b", 8192, 2523.0))


@dataclass(frozen=True)
class Row:
    """One line of a table: a name, and what is beside it."""

    name: str
    figures: tuple[float | None, ...]
    """Published and ours in turns; None where nothing was published."""
    note: str = ""

    def markdown(self) -> str:
        """The line in Markdown."""
        cells = ["" if figure is None else f"{figure:,.4g}" for figure in self.figures]
        return " | ".join([f"| {self.name}", *cells, f"{self.note} |"])


def flops_rows() -> Iterator[Row]:
    """Model FLOPs per token, GFLOP."""
    for model, context, published in FLOPS:
        ours = Run(model, model, H100, 8, context, {"data_parallel_shard": 8}).flops_per_token() / 1e9
        yield Row(f"{model}, {context} tokens", (published, ours), "causal attention")


def run_rows() -> Iterator[Row]:
    """Seconds of a step and GiB allocated."""
    for run in (*TORCHTITAN, *SIMUMAX, *VTRAIN, *AUTOMODEL):
        chosen = run.assessed()
        items = time_breakdown(chosen.group)
        products = float(items["matrix products"][0])
        seconds = float(chosen.group.step_seconds[0]) + products / 3 * run.products_repeated
        peaks, capacity = chosen.group.peaks, chosen.problem.capacity_bytes
        memory = None
        if run.memory_gib is not None:
            memory = float(peaks.allocated.max()) / GIB + run.extra_gib
        said = verdict(float(peaks.peak.max()), float(peaks.upper.max()), capacity)
        note = f"{said}; {run.differs}" if run.differs else said
        yield Row(run.name, (run.step_seconds, seconds, run.memory_gib, memory), note)


def documented() -> dict[str, tuple[float | None, ...]]:
    """The figures of every row in the page."""
    rows: dict[str, tuple[float | None, ...]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) > 2 and re.fullmatch(r"[\d.,]+", cells[1]):
            rows[cells[0]] = tuple(float(c.replace(",", "")) if c else None for c in cells[1:-1])
    return rows


def main() -> None:
    """Print both tables."""
    print("| model | published, GFLOP | ours | convention |\n|---|---|---|---|")
    print("\n".join(row.markdown() for row in flops_rows()))
    print("\n| run | published, s a step | ours | published, GiB | ours | our verdict, and where we differ |")
    print("|---|---|---|---|---|---|")
    print("\n".join(row.markdown() for row in run_rows()))


if __name__ == "__main__":
    main()
