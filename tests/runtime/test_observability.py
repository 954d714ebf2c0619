"""What a run shows of itself: details of layers, experts and ranks, profiles on demand, Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from shipway.runtime.details import layer_of, slow_ranks
from shipway.runtime.exit_codes import ExitCode, Fatal
from shipway.runtime.metrics import DETAILS_FILE, StepMetrics, read_metrics, rewind
from shipway.runtime.profiling import (
    DEFAULT_STEPS,
    DESCRIPTION,
    MEMORY_BIT,
    REQUEST_FILE,
    UNNAMED,
    ProfileRequests,
    communication_seconds,
)
from shipway.runtime.progress import Silent
from shipway.runtime.prometheus import Exporter
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.session import train_here
from shipway.runtime.signals import StopRequest
from shipway.runtime.weights_and_biases import Reporter
from shipway.schemas.layout import Layout
from shipway.schemas.training import WeightsAndBiases
from tests.runtime.ranks import run_ranks
from tests.runtime.small_plan import CONTEXT_TOKENS, small_plan, write_build

STEPS, SEQUENCES, ACTIVE, EXPERTS = 6, 4, 2, 8
LAYOUTS = {
    "fsdp 2": Layout(data_parallel_shard=2, micro_batch=2),
    "pp 2": Layout(
        pipeline_parallel=2,
        micro_batch=1,
        micro_batches=4,
        zero=1,
        schedule="1f1b",
        stage_layers=((0, 3), (3, 5)),
    ),
}


class Scraping(Silent):
    """Reads what Prometheus would, after a step; asks for a profile after another."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._url = ""
        self.scraped = ""

    def message(self, text: str) -> None:
        if found := re.search(r"http://\S+:(\d+)/metrics", text):
            self._url = f"http://127.0.0.1:{found[1]}/metrics"

    def step(self, metrics: StepMetrics) -> None:
        if metrics.step == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        if metrics.step == 5:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(self._url) as answer:
                self.scraped = answer.read().decode()


def watched(build: Path, run: Path) -> tuple[ExitCode, str]:
    stop = StopRequest()
    stop.install()
    rank = torch.distributed.get_rank()
    display = Scraping(run) if rank == 0 else Silent()
    code = train_here(build, RunFolder(run), torch.device("cpu"), stop, display=display)
    return code, getattr(display, "scraped", "")


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder of a run that was watched, and what Prometheus was told."""
    folder = tmp_path_factory.mktemp("watched")
    plan = small_plan(
        {"only": STEPS},
        [LAYOUTS[request.param]],
        sequences=SEQUENCES,
        evaluation={"every_steps": 100, "sequences": 2},
        observability={"details_every_steps": 2, "prometheus_port": 0, "slow_rank_factor": 1e9},
    )
    outcomes = run_ranks(watched, 2, write_build(plan, folder / "build"), folder / "run")
    assert [code for code, _ in outcomes] == [ExitCode.DONE] * 2
    return folder / "run", outcomes[0][1]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line.get("event") == kind]


def test_details_come_when_due_and_say_what_each_layer_and_expert_did(run: tuple[Path, str]) -> None:
    steps = {s["step"]: s for s in read_metrics(run[0] / "metrics.jsonl") if "event" not in s}
    details = read_metrics(run[0] / DETAILS_FILE)
    assert [entry["step"] for entry in details] == [2, 4, 6]
    for entry in details:
        squares = sum(norm**2 for norm in entry["gradient_norm"].values())
        assert squares**0.5 == pytest.approx(steps[entry["step"]]["gradient_norm"], rel=1e-4)
        assert set(entry["gradient_norm"]) >= {"0", "1", "2", "3", "4", "outside layers"}
        assert set(entry["activation_rms"]) >= {"0", "1", "2", "3", "4"}
        assert all(0 < rms < 1e3 for rms in entry["activation_rms"].values())
        for layer in ("1", "2", "3", "4"):  # the first is dense
            assert len(entry["expert_hits"][layer]) == EXPERTS
            assert sum(entry["expert_hits"][layer]) == SEQUENCES * CONTEXT_TOKENS * ACTIVE
        assert 0 < entry["probe_seconds"]["least"] <= entry["probe_seconds"]["most"]
        assert entry["slow_ranks"] == []
        assert entry["utilisation"] is None, "a CPU has no such counter"


@pytest.mark.parametrize("step", [0, 1, 2, 17, 40, 99])
@pytest.mark.parametrize("tail", ["", '{"step": 41, "lo'])
def test_a_resume_drops_what_it_will_write_again(tmp_path: Path, step: int, tail: str) -> None:
    paths = [tmp_path / "metrics.jsonl", tmp_path / DETAILS_FILE]
    for path, width in zip(paths, (3, 9000), strict=True):
        lines = [{"step": n, "text": "x" * (n % 7 * width)} for n in range(1, 41) for _ in range(1 + n % 3)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    rewind(paths[0], step)
    for path in paths:
        assert {line["step"] for line in read_metrics(path)} == set(range(1, min(step, 40) + 1))
        assert path.read_text().endswith("\n") or step == 0
    rewind(tmp_path / "nothing.jsonl", 3)


def test_a_signal_makes_a_profile_that_perfetto_opens(run: tuple[Path, str]) -> None:
    (profile,) = events(run[0], "profile")
    assert profile["steps"] == DEFAULT_STEPS
    assert profile["first_step"] in (2, 3), "from the step after the one in which the signal came"
    folder = run[0] / "profiles" / f"step-{profile['first_step']:08d}"
    assert json.loads((folder / "summary.json").read_text())["steps"] == DEFAULT_STEPS
    for rank in (0, 1):
        text = (folder / f"rank{rank}.trace.json").read_text()
        assert '"traceEvents"' in text
        assert '"aten::mm"' in text
    assert profile["communication_seconds_per_step"][UNNAMED] > 0


def test_prometheus_is_told_the_newest_figures(run: tuple[Path, str]) -> None:
    lines = dict(line.rsplit(" ", 1) for line in run[1].splitlines() if not line.startswith("#"))
    labels = 'blueprint="small"'
    step = next(value for name, value in lines.items() if name.startswith("shipway_train_step{"))
    assert float(step) == 5
    assert any(n.startswith("shipway_train_loss{") and labels in n for n in lines)
    assert any(n.startswith("shipway_expert_load{") and 'layer="' in n for n in lines)
    assert "# TYPE shipway_train_loss gauge" in run[1]


def test_a_request_is_taken_once_and_bounded(tmp_path: Path) -> None:
    path, stop = tmp_path / REQUEST_FILE, StopRequest()

    def pending(text: str | None) -> int:
        if text is not None:
            path.write_text(text)
        return ProfileRequests(path, looks=True, stop=stop).pending()

    assert pending(None) == 0
    assert pending('{"steps": 5}') == 5
    assert not path.exists()
    assert pending('{"steps": 4, "memory": true}') == 4 | MEMORY_BIT
    assert pending('{"steps": 1000000}') == 100
    assert pending('{"steps": "many"}') == DEFAULT_STEPS
    assert pending("not JSON") == 0
    stop.profile = True
    assert ProfileRequests(path, looks=False, stop=stop).pending() == DEFAULT_STEPS
    assert not stop.profile


def test_communication_of_a_trace_is_told_by_axis() -> None:
    def kernel(name: str, microseconds: float, group: str | None) -> dict[str, Any]:
        arguments = {} if group is None else {"Process Group Description": group}
        return {"ph": "X", "cat": "kernel", "name": name, "dur": microseconds, "args": arguments}

    events = [
        kernel("ncclDevKernel_AllGather_RING_LL", 1500, "mesh_fsdp"),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16", 500, "mesh_fsdp"),
        kernel("ncclDevKernel_SendRecv", 250, "mesh_pp"),
        kernel("nccl:old", 10, None),
        kernel("gemm", 9000, None),
        {"ph": "X", "name": "ncclDevKernel", "cat": "kernel", "dur": 4000, "args": {"External id": 7}},
        {"ph": "X", "name": "record_param_comms", "args": {"External id": 7, DESCRIPTION: "mesh_cp"}},
        {"ph": "M", "name": "process_name"},
    ]
    assert communication_seconds(events) == pytest.approx(
        {"fsdp": 2e-3, "pp": 2.5e-4, "cp": 4e-3, UNNAMED: 1e-5}
    )


def test_slow_ranks_are_those_beyond_the_factor() -> None:
    assert slow_ranks([1.0, 1.05, 0.98, 1.6], 1.3) == {3: pytest.approx(1.6 / 1.025)}
    assert slow_ranks([0.0, 0.0], 1.3) == {}
    assert slow_ranks([2.0], 1.3) == {}


def test_layers_of_parameters() -> None:
    assert layer_of("layers.12.attention.q_proj.weight") == "12"
    assert layer_of("prediction.0.layer.attention.q_proj.weight") == "prediction.0"
    assert layer_of("embed.weight") == "outside layers"


def test_a_port_that_is_taken_is_refused_with_a_way_out() -> None:
    first = Exporter(0, {})
    try:
        with pytest.raises(Fatal, match="choose another port, or 0"):
            Exporter(first.port, {})
    finally:
        first.close()


def test_awkward_values_and_labels_are_written_as_prometheus_reads_them() -> None:
    exporter = Exporter(0, {"run": 'a"b\\c'})
    exporter.set({"train/loss": float("nan"), "held-out/x": float("inf")})
    exporter.close()
    text = exporter.text()
    assert 'shipway_train_loss{run="a\\"b\\\\c"} NaN' in text
    assert "shipway_held_out_x{" in text
    assert text.rstrip().splitlines()[1].endswith("+Inf")


def test_weights_and_biases_without_the_package_is_refused_and_offline_it_writes(tmp_path: Path) -> None:
    options = WeightsAndBiases(project="test", mode="offline")
    plan = small_plan({"only": 2}, [Layout(micro_batch=4)], sequences=4)
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(Fatal, match=r"pip install 'shipway\[wandb\]'"):
            Reporter(options, plan, tmp_path)
        return
    reporter = Reporter(options, plan, tmp_path)
    reporter.log({"train/loss": 2.5}, 1)
    reporter.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
