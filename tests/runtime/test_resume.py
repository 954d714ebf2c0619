"""A run that is stopped, killed or broken goes on as if it had not been.

Each world trains a small build on the standard library's source, as `shipway launch` does.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shipway.runtime.checkpoint_folder import MARKER, checkpoint_folders
from shipway.runtime.exit_codes import ExitCode, Fatal
from shipway.runtime.failures import classify
from shipway.runtime.metrics import StepMetrics, read_metrics
from shipway.runtime.progress import Silent
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.session import train_here
from shipway.runtime.signals import StopRequest
from shipway.schemas.layout import Layout
from tests.runtime.ranks import run_ranks
from tests.runtime.small_plan import small_plan, write_build

STAGES = {"short": 4, "long": 3}
LAYERS = 3
OPTIONS: dict[str, Any] = {
    "checkpoints": {"every_steps": 3, "keep_last": 2},
    "evaluation": {"every_steps": 100, "sequences": 2},
}
LAYOUTS = [
    Layout(data_parallel_shard=2, micro_batch=2),
    Layout(data_parallel_shard=2, micro_batch=1, micro_batches=2),
]


class Interrupting(Silent):
    """Sends this process a signal after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, metrics: StepMetrics) -> None:
        if metrics.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def start(build: Path, run: Path, stop_after: int | None = None) -> ExitCode:
    """One start on this rank; with `stop_after`, the last rank alone is told to stop after that step."""
    stop = StopRequest()
    stop.install()
    told = stop_after is not None and dist.get_rank() == dist.get_world_size() - 1
    display = Interrupting(stop_after) if told and stop_after is not None else Silent()
    return train_here(build, RunFolder(run), torch.device("cpu"), stop, display=display)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = small_plan(STAGES, LAYOUTS, sequences=4, layers=LAYERS, **OPTIONS)
    return write_build(plan, tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def unbroken(build: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """Figures of the run that nothing interrupts, through both stages."""
    run = tmp_path_factory.mktemp("runs") / "unbroken"
    assert run_ranks(start, 2, build, run) == [ExitCode.DONE] * 2
    assert (run / "report.html").exists()
    return figures(run)


def figures(run: Path) -> list[tuple[Any, ...]]:
    """Of each step: stage, loss, gradient norm, hash of all tokens so far."""
    steps = [line for line in read_metrics(run / "metrics.jsonl") if "event" not in line]
    return [(s["stage"], s["step"], s["loss"], s["gradient_norm"], s["stream_hash"]) for s in steps]


def test_loss_and_stages_come_in_order(unbroken: list[tuple[Any, ...]]) -> None:
    assert [entry[:2] for entry in unbroken] == [
        *(("short", step) for step in range(1, 5)),
        *(("long", step) for step in range(5, 8)),
    ]
    assert unbroken[-1][2] < unbroken[0][2]


@pytest.mark.parametrize("stop_after", [2, 5])
def test_signal_to_one_rank_saves_and_the_next_start_goes_on_bit_for_bit(
    build: Path, unbroken: list[tuple[Any, ...]], tmp_path: Path, stop_after: int
) -> None:
    run = tmp_path / "run"
    assert run_ranks(start, 2, build, run, stop_after) == [ExitCode.PREEMPTED] * 2
    assert len(figures(run)) == stop_after, "it stops at the end of the step"
    assert run_ranks(start, 2, build, run) == [ExitCode.DONE] * 2
    assert figures(run) == unbroken


def test_state_that_one_stage_keeps_on_the_host_goes_on_in_the_next_on_the_device(
    unbroken: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    moved = {"offload": "both", "recompute": "full"}
    layouts = [LAYOUTS[0].model_copy(update=moved), LAYOUTS[1]]
    build = write_build(
        small_plan(STAGES, layouts, sequences=4, layers=LAYERS, **OPTIONS), tmp_path / "build"
    )
    run = tmp_path / "run"
    assert run_ranks(start, 2, build, run, 2) == [ExitCode.PREEMPTED] * 2
    assert run_ranks(start, 2, build, run) == [ExitCode.DONE] * 2
    assert figures(run) == unbroken, "saved from host memory, restored there, and then to the device"


def test_torn_checkpoint_costs_the_interval_and_no_sample(
    build: Path, unbroken: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_ranks(start, 2, build, run, 4)
    newest = checkpoint_folders(run / "checkpoints")[0]
    (newest / MARKER).unlink()
    assert run_ranks(start, 1, build, run) == [ExitCode.DONE], "on one rank instead of two, too"
    found = figures(run)
    assert [entry[4] for entry in found] == [entry[4] for entry in unbroken], "exactly the same tokens"
    assert [entry[2] for entry in found] == pytest.approx([entry[2] for entry in unbroken], rel=1e-4)


def poison(build: Path, folder: Path, policy: str, limit: int = 5) -> Path:
    """The build with a model whose loss is not finite in the third forward of each process."""
    plan = small_plan(
        {"only": 5},
        [Layout(data_parallel_shard=2, micro_batch=2)],
        sequences=4,
        layers=LAYERS,
        faults={"non_finite": policy, "non_finite_limit": limit},
        checkpoints={"every_steps": 2},
        evaluation=OPTIONS["evaluation"],
    )
    poisoned = write_build(plan, folder)
    text = (build / "model.py").read_text()
    text += (
        "\n\n_calls = [0]\n_forward = Model.forward\n\n\n"
        "def _poisoned(self, tokens, labels=None, *rest, **more):\n"
        "    _calls[0] += labels is not None\n"
        "    value = _forward(self, tokens, labels, *rest, **more)\n"
        "    return value * float('nan') if labels is not None and _calls[0] == 3 else value\n\n\n"
        "Model.forward = _poisoned\n"
    )
    (poisoned / "model.py").write_text(text)
    return poisoned


def start_and_catch(build: Path, run: Path) -> tuple[int | None, str]:
    try:
        return int(start(build, run)), ""
    except Fatal as error:
        return None, classify(error)[1]


def test_bad_step_is_left_out(build: Path, tmp_path: Path) -> None:
    poisoned = poison(build, tmp_path / "build", "skip")
    assert run_ranks(start_and_catch, 2, poisoned, tmp_path / "run") == [(0, "")] * 2
    steps = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "event" not in line]
    assert [step["finite"] for step in steps] == [True, True, False, True, True]
    assert steps[3]["loss"] < steps[0]["loss"]


def test_bad_step_rolls_back_and_reads_on(build: Path, tmp_path: Path) -> None:
    poisoned = poison(build, tmp_path / "build", "rollback")
    assert run_ranks(start_and_catch, 2, poisoned, tmp_path / "run") == [(0, "")] * 2
    manifest = json.loads((checkpoint_folders(tmp_path / "run/checkpoints")[0] / MARKER).read_text())
    assert manifest["progress"]["position"]["stage_step"] == 5
    assert manifest["progress"]["optimizer_steps"] == 4, "two before the checkpoint, two after the bad step"


def test_bad_step_stops_the_run_when_asked(build: Path, tmp_path: Path) -> None:
    poisoned = poison(build, tmp_path / "build", "stop")
    for code, reason in run_ranks(start_and_catch, 2, poisoned, tmp_path / "run"):
        assert code is None
        assert "step 3 of stage only: loss nan" in reason
        assert reason.endswith("(in step 3, update)")


def test_chain_of_starts_without_a_step_ends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert [folder.record_start(step) for step in (0, 4, 4, 4)] == [True] * 4
    assert folder.record_start(4) is False
    assert folder.record_start(5) is True
