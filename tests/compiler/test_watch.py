"""What `shipway watch` tells of a run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shipway.compiler.cli.app import run as shipway
from shipway.compiler.launch import record
from shipway.compiler.render.watch import sparkline
from shipway.compiler.watch import snapshot, tail
from shipway.schemas.run import RunRecord

NOW = 2_000_000_000.0


def step(number: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "stage": "short", "step": number, "stage_step": number, "stage_steps": 40, "loss": 5.0 - number / 10,
        "learning_rate": 1e-3, "gradient_norm": 0.5, "finite": True, "tokens": 4096 * number,
        "step_seconds": 0.5, "planned_step_seconds": 0.4, "tokens_per_second": 8192.0,
        "planned_tokens_per_second": 10240.0, "mfu": 0.2, "planned_mfu": 0.25, "data_wait_seconds": 0.05,
        "memory_allocated_bytes": None, "memory_reserved_bytes": None,
        "planned_memory_allocated_bytes": 2**30, "planned_memory_reserved_bytes": 2**30,
        "stream_hash": "x", "expert_load": {"1": 1.5, "2": 2.0},
        **changes,
    }  # fmt: skip


def write(folder: Path, lines: list[dict[str, Any]], quiet_seconds: float = 1.0) -> Path:
    """A run that is said to be running, whose last step was so long ago."""
    entry = RunRecord(
        id=folder.name, name="tiny", plan_hash="sha256:0", target="local", build=str(folder / "build"),
        launched_at="2026-11-30T09:00:00Z",
    )  # fmt: skip
    record.write_record(folder, entry)
    (folder / "status.json").write_text(json.dumps({"state": "running", "step": len(lines)}))
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"stage": "sh')
    os.utime(metrics, (NOW - quiet_seconds, NOW - quiet_seconds))
    checkpoint = folder / "checkpoints" / "step-00000003" / "complete.json"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    os.utime(checkpoint, (NOW - 90, NOW - 90))
    return folder


def test_figures_stand_beside_the_plans(tmp_path: Path) -> None:
    found = snapshot(write(tmp_path / "run", [step(n) for n in range(1, 31)]), NOW)
    assert found["progress"]["step"] == 30
    assert found["progress"]["stage_seconds_left"] == pytest.approx(5.0)
    assert found["step_seconds"] == {"measured": 0.5, "planned": 0.4, "ratio": pytest.approx(1.25)}
    assert found["tokens_per_second"]["ratio"] == pytest.approx(0.8)
    assert found["memory_allocated_bytes"]["measured"] is None
    assert found["data_wait_share"] == pytest.approx(0.1)
    assert found["expert_load"] == {"worst_layer": "2", "worst": 2.0, "mean": 1.75}
    assert found["loss"]["last"] == pytest.approx(2.0)
    assert found["checkpoint"]["step"] == 3
    assert found["checkpoint"]["age_seconds"] == pytest.approx(90)


@pytest.mark.parametrize(("quiet_seconds", "stalled"), [(1, False), (59, False), (61, True)])
def test_a_run_that_stands_still_is_told(tmp_path: Path, quiet_seconds: float, stalled: bool) -> None:
    found = snapshot(write(tmp_path / "run", [step(1)], quiet_seconds), NOW)
    assert found["progress"]["stalled"] is stalled


def test_slow_steps_are_no_stall(tmp_path: Path) -> None:
    lines = [step(n, step_seconds=30.0) for n in range(1, 4)]
    assert not snapshot(write(tmp_path / "run", lines, quiet_seconds=200), NOW)["progress"]["stalled"]


def test_events_between_steps_are_read_apart(tmp_path: Path) -> None:
    slow = [{"rank": 3, "host": "n7", "times_median": 1.8}]
    lines = [
        step(1),
        {"event": "evaluation", "stage": "short", "step": 1, "measures": {"held_out/all": 4.5}},
        {
            "event": "profile", "stage": "short", "step": 1,
            "communication_seconds_per_step": {"fsdp": 0.1},
            "planned_communication_seconds_per_step": {"fsdp": 0.05},
        },
        step(2, loss=float("nan"), finite=False),
    ]  # fmt: skip
    folder = write(tmp_path / "run", lines)
    details = {"stage": "short", "step": 1, "slow_ranks": slow, "utilisation": None}
    (folder / "details.jsonl").write_text(json.dumps(details) + "\n")
    found = snapshot(folder, NOW)
    assert found["evaluation"] == {"held_out/all": 4.5}
    assert found["slow_ranks"] == slow
    assert found["not_finite"] == 1
    assert found["communication"]["measured_seconds_per_step"] == {"fsdp": 0.1}


def test_a_run_before_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", [])
    assert snapshot(tmp_path / "run", NOW)["progress"] is None
    assert shipway(["watch", "run", "--runs", str(tmp_path), "--once"]) == 0
    assert "no step yet" in capsys.readouterr().out


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1000)))
    assert [line["step"] for line in tail(path, size=60)] == [996, 997, 998, 999]
    assert tail(tmp_path / "none") == []


def test_once_is_for_people_and_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", [step(1), step(2, loss=float("nan"))])
    assert shipway(["watch", "--runs", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    for words in ("stage short", "2/40", "step time", "tokens per second", "expert load", "last checkpoint"):
        assert words in shown
    assert shipway(["watch", "--runs", str(tmp_path), "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert told["loss"]["last"] is None
    assert told["run"] == "run"


def test_only_a_running_run_is_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", [step(1)])  # it says so, and no process of it is there
    assert shipway(["profile", "--runs", str(tmp_path)]) == 4
    assert "LA065" in capsys.readouterr().err
    assert not (tmp_path / "run" / "profile.request").exists()
    waiting = [sys.executable, "-c", "input()", "shipway.runtime.supervisor"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE) as supervisor:
        (tmp_path / "run" / "supervisor.pid").write_text(f"{supervisor.pid}\n")
        assert shipway(["profile", "--runs", str(tmp_path), "--steps", "2", "--memory", "--json"]) == 0
        supervisor.communicate(b"\n")
    assert json.loads((tmp_path / "run" / "profile.request").read_text()) == {"steps": 2, "memory": True}


def test_curves_are_drawn_from_low_to_high() -> None:
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([2.0, float("nan"), 2.0]) == "▁ ▁"
    assert sparkline([float("nan")]) == ""
