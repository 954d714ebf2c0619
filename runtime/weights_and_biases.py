"""Scalars to Weights & Biases, where the blueprint asks for it and the `wandb` extra is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shipway.runtime.exit_codes import Fatal
from shipway.schemas.plan import Plan
from shipway.schemas.training import WeightsAndBiases


class Reporter:
    """One W&B run per run of ours, continued over restarts by its id. Rank 0 only."""

    def __init__(self, options: WeightsAndBiases, plan: Plan, run: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise Fatal(
                "training.observability.weights_and_biases is set and wandb is not installed:"
                " pip install 'shipway[wandb]', or leave the section out"
            ) from error
        try:
            self._run: Any = wandb.init(
                project=options.project,
                entity=options.entity,
                mode=options.mode,
                id=run.name,
                name=run.name,
                resume="allow",
                dir=str(run),
                config={"plan": plan.hash, "blueprint": plan.blueprint.model_dump(mode="json")},
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.errors.Error, OSError) as error:
            raise Fatal(
                f"Weights & Biases cannot be reached: {error}; `wandb login` on rank 0's host,"
                " or training.observability.weights_and_biases.mode=offline"
            ) from error

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Send scalars of a step."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
