"""AIHC: the request's body as a golden file, the signature, and keys that go nowhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shipway.compiler.launch.aihc import Aihc, body, body_text
from shipway.compiler.launch.bce import authorization
from shipway.compiler.launch.target import Run
from tests.launch.builds import built, jobs_of
from tests.launch.targets import AIHC, ALL, ON_GPUS

GOLDEN = Path(__file__).parent / "golden" / "aihc-create-job.json"


def test_the_body_is_the_golden_one() -> None:
    """All of it but the plan's hash, which changes with every figure of the planner."""
    jobs = replace(jobs_of(*ALL["aihc"]), plan_hash="sha256:" + 64 * "0")
    assert body_text(jobs, "tiny-1") == GOLDEN.read_text()


def test_bccl_needs_two_whole_machines_of_a800() -> None:
    assert body(jobs_of(*ON_GPUS, *AIHC), "run")["enableBccl"] is True
    other = tuple(o.replace("a800_80g", "h800_80g") for o in AIHC)
    assert body(jobs_of(*ON_GPUS, *other), "run")["enableBccl"] is False


def test_platform_settings_of_nccl_are_left_alone() -> None:
    assert "NCCL" not in body_text(jobs_of(*ALL["aihc"]), "run")


def test_keys_are_asked_for_and_never_part_of_a_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = jobs_of(*ALL["aihc"])
    monkeypatch.delenv("BCE_ACCESS_KEY_ID", raising=False)
    assert [found.code for found in Aihc().check(jobs, tmp_path)] == ["LA050"]
    monkeypatch.setenv("BCE_ACCESS_KEY_ID", "the-access-key")
    monkeypatch.setenv("BCE_SECRET_ACCESS_KEY", "the-secret-key")
    assert Aihc().check(jobs, tmp_path) == []
    build = built(tmp_path / "build", *ALL["aihc"])
    (command,) = Aihc().submit(jobs, Run(tmp_path / "run", build))
    assert "the-" not in repr(command)
    assert not any("the-secret-key" in path.read_text() for path in build.rglob("*") if path.is_file())


def test_the_signature_covers_method_query_headers_and_time() -> None:
    url = "https://aihc.bj.baidubce.com/?queueID=q&action=CreateJob"
    headers = {"Host": "aihc.bj.baidubce.com", "x-bce-date": "2026-01-01T00:00:00Z"}
    signed = authorization("POST", url, headers, "ak", "sk", "2026-01-01T00:00:00Z")
    prefix, names, signature = signed.rsplit("/", 2)
    assert prefix == "bce-auth-v1/ak/2026-01-01T00:00:00Z/1800"
    assert names == "host;x-bce-date"
    assert len(signature) == 64
    for changed in (
        authorization("GET", url, headers, "ak", "sk", "2026-01-01T00:00:00Z"),
        authorization("POST", url + "&x=1", headers, "ak", "sk", "2026-01-01T00:00:00Z"),
        authorization("POST", url, {**headers, "Host": "other"}, "ak", "sk", "2026-01-01T00:00:00Z"),
        authorization("POST", url, headers, "ak", "other", "2026-01-01T00:00:00Z"),
        authorization("POST", url, headers, "ak", "sk", "2026-01-01T00:00:01Z"),
    ):
        assert changed.rsplit("/", 1)[1] != signature
    reordered = authorization(
        "POST",
        "https://aihc.bj.baidubce.com/?action=CreateJob&queueID=q",
        headers,
        "ak",
        "sk",
        "2026-01-01T00:00:00Z",
    )
    assert reordered == signed
