"""Logs of an AIHC job and the nodes that they accuse; the service answers as its interface says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from shipway.compiler.cli.app import run as shipway
from shipway.compiler.launch import aihc_pods, record
from shipway.compiler.launch.launch import Launch, prepare, start
from shipway.schemas.run import Job, RunRecord
from tests.launch.builds import built
from tests.launch.targets import ALL

LINES = {
    "job-master-0": ["[rank 0] step 1", "exclude: job-worker-0", "[rank 0] step 2"],
    "job-worker-0": ["[rank 1] step 1"],
}
PODS = [
    {"name": "job-master-0", "nodeName": "192.168.0.1"},
    {"name": "job-worker-0", "nodeName": "192.168.0.2"},
]
PAGE = 2


class Answers(BaseHTTPRequestHandler):
    """The service: two lines a page, and a job that ends at the second look."""

    server: Service

    def do_POST(self) -> None:
        """Answer one action."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (action,) = parse_qs(urlsplit(self.path).query)["action"]
        assert self.headers["X-API-Version"] == "v2"
        assert self.headers["Authorization"].startswith("bce-auth-v1/key/")
        assert asked.pop("jobId", "job-1") == "job-1" or action == "CreateJob"
        answer = json.dumps(self.server.answer(action, asked)).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


class Service(ThreadingHTTPServer):
    """Its state."""

    looks = 0
    created: dict[str, Any] | None = None

    def answer(self, action: str, asked: dict[str, Any]) -> dict[str, Any]:
        if action == "CreateJob":
            self.created = asked
            return {"jobId": "job-2", "jobName": asked["name"]}
        if action == "DescribeJob":
            self.looks += bool(asked.get("needDetail"))
            return {"jobId": "job-1", "status": "Running" if self.looks == 1 else "Failed", "pods": PODS}
        assert action == "DescribeJobLogs"
        lines = [line for line in LINES[asked["podName"]] if asked.get("keywords", "") in line]
        if self.looks == 1:  # the last line is written later
            lines = lines[:-1]
        begin = int(asked.get("marker", 0))
        more = {"nextMarker": str(begin + PAGE)} if begin + PAGE < len(lines) else {"nextMarker": ""}
        return {"logs": lines[begin : begin + PAGE], **more}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("BCE_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("BCE_SECRET_ACCESS_KEY", "secret")
    with Service(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def launched(service: Service, tmp_path: Path) -> Path:
    """A run `r` with one job; its folder of runs."""
    url = f"http://127.0.0.1:{service.server_address[1]}"
    build = built(tmp_path / "b", *ALL["aihc"], f"+cluster.target.endpoint='{url}'")
    ready = prepare(build, tmp_path / "runs", run_id="r")
    assert isinstance(ready, Launch)
    entry = RunRecord(
        id="r", name="tiny", plan_hash=ready.plan.hash, target="aihc", build=str(build),
        launched_at=record.now(), jobs=(Job(stage="all", id=f"{url} cce-e1 training job-1"),),
    )  # fmt: skip
    record.write_record(tmp_path / "runs/r", entry)
    return tmp_path / "runs"


def test_logs_are_those_of_all_pods_and_all_pages(
    service: Service, launched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.looks = 1
    assert shipway(["logs", "r", "--runs", str(launched)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"[{pod}] {line}" for pod, lines in LINES.items() for line in lines
    ]


def test_logs_are_followed_until_the_job_ends_and_no_line_comes_twice(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aihc_pods, "PAUSE_SECONDS", 0.0)
    url = f"http://127.0.0.1:{service.server_address[1]}"
    assert aihc_pods.main(["follow", url, "cce-e1", "training", "job-1"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert service.looks == 2
    assert [line for line in told if "master" in line] == [
        f"[job-master-0] {line}" for line in LINES["job-master-0"]
    ]
    assert sorted(told) == sorted(f"[{pod}] {line}" for pod, lines in LINES.items() for line in lines)


def test_a_service_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BCE_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("BCE_SECRET_ACCESS_KEY", "secret")
    assert aihc_pods.main(["logs", "http://127.0.0.1:1", "p", "q", "j"]) == 4
    assert "cannot be reached" in capsys.readouterr().err


def test_a_bad_node_is_named_with_what_to_do_as_the_job_may_get_there_again(
    service: Service, launched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.looks = 2
    assert shipway(["resume", "r", "--runs", str(launched)]) == 0
    told = capsys.readouterr().err
    assert "warning[LA052]: AIHC cannot be told to stay off 192.168.0.2" in told
    assert "kubectl cordon" in told
    assert service.created is not None
    assert service.created["name"] == "r-r2"
    assert shipway(["resume", "r", "--exclude", "x", "--runs", str(launched), "--json"]) == 4


def test_a_run_that_was_launched_names_its_job(service: Service, launched: Path) -> None:
    ready = prepare(launched.parent / "b", launched, run_id="other")
    assert isinstance(ready, Launch)
    started = start(ready)
    assert not hasattr(started, "diagnostics")
    entry = record.read_record(launched / "other")
    assert entry is not None
    assert entry.jobs[0].id.endswith("cce-e1 training job-2")
