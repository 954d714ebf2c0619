"""What a person sees: a live panel on a terminal, plain lines in the log and anywhere else. Rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shipway.runtime.metrics import StepMetrics
from shipway.runtime.terminal import console_on_terminal


class Display(Protocol):
    """Shows steps and messages."""

    def step(self, metrics: StepMetrics) -> None:
        """A step has ended."""

    def message(self, text: str) -> None:
        """Something a person should know."""

    def close(self) -> None:
        """The run ends."""


def make_display(rank: int) -> Display:
    """The display for this rank and terminal."""
    if rank != 0:
        return Silent()
    if (terminal := console_on_terminal()) is not None:
        return Both(Lines(), Live(terminal))
    console = Console()
    return Live(console) if console.is_terminal else Lines()


class Silent:
    """Other ranks."""

    def step(self, metrics: StepMetrics) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Both:
    """Two displays at once."""

    def __init__(self, *displays: Display) -> None:
        self._displays = displays

    def step(self, metrics: StepMetrics) -> None:
        """Show it on each."""
        for display in self._displays:
            display.step(metrics)

    def message(self, text: str) -> None:
        """Show it on each."""
        for display in self._displays:
            display.message(text)

    def close(self) -> None:
        """Close each."""
        for display in self._displays:
            display.close()


class Lines:
    """One line for about each hundredth of a stage."""

    def step(self, metrics: StepMetrics) -> None:
        """Print the step when it is the first, the last, or on the grid."""
        every = max(1, metrics.stage_steps // 100)
        if metrics.stage_step in (1, metrics.stage_steps) or metrics.stage_step % every == 0:
            print(describe(metrics), flush=True)

    def message(self, text: str) -> None:
        """Print it."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing to undo."""


class Live:
    """A progress bar for the stage with the figures beside it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.fields[stage]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Move the bar."""
        if self._task is None or self._stage != metrics.stage:
            self._stage = metrics.stage
            self._task = self._progress.add_task(
                "", total=metrics.stage_steps, stage=metrics.stage, figures=""
            )
        self._progress.update(self._task, completed=metrics.stage_step, figures=figures(metrics))

    def message(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Give the terminal back."""
        self._progress.stop()


def figures(metrics: StepMetrics) -> str:
    """Loss, speed and expert load, short."""
    parts = [f"loss {metrics.loss:.4f}", f"{metrics.tokens_per_second:,.0f} tok/s"]
    if metrics.expert_load:
        parts.append(f"expert load {max(metrics.expert_load.values()):.2f}x")
    if not metrics.finite:
        parts.append("not finite, skipped")
    return "  ".join(parts)


def describe_evaluation(stage: str, step: int, measures: Mapping[str, float]) -> str:
    """Held-out loss and, at a stage's end, the share of exact answers by kind."""
    parts = []
    if "held_out/all" in measures:
        parts.append(f"held-out loss {measures['held_out/all']:.4f}")
    for kind in ("needle", "tasks", "captions"):
        shares = [value for name, value in measures.items() if name.startswith(f"{kind}/")]
        if shares:
            parts.append(f"{kind} {sum(shares) / len(shares):.0%}")
    return f"{stage}  step {step}  evaluation: " + ("  ".join(parts) or "nothing to evaluate on")


def describe(metrics: StepMetrics) -> str:
    """One line for a log."""
    return (
        f"{metrics.stage}  step {metrics.stage_step}/{metrics.stage_steps}  {figures(metrics)}"
        f"  lr {metrics.learning_rate:.3g}  grad {metrics.gradient_norm:.3f}  {metrics.step_seconds:.2f} s"
    )
