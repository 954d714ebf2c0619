"""`shipway data` end to end, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shipway.compiler.cli.app import run


def test_pack_and_inspect(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("first\nsecond\n")
    packed = run(["data", "pack", f"{tmp_path}/a.txt", "-o", f"{tmp_path}/out", "--documents", "line"])
    assert packed == 0
    assert "13 tokens of 2 documents" in capfd.readouterr().out
    assert (
        run(["data", "inspect", f"{tmp_path}/out", "--json", "--tokenizer", "bytes", "--document", "1"]) == 0
    )
    report = json.loads(capfd.readouterr().out)
    assert report["shards"][0]["documents"] == 2
    assert report["preview"] == "second"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "/nowhere"], "/nowhere does not exist"),
        (["pack", "/nowhere", "-o", "out"], "/nowhere does not exist"),
        (["pack", "/nowhere", "-o", "out", "--part", "5/2"], "part 5 of 2 does not exist"),
        (["pack", "/nowhere"], "--out"),
        (["pack", "python_stdlib", "-o", "out", "--tokenizer", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", *arguments]) == 2
    error = capfd.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert run(["data", *arguments, "--json"]) == 2
    (told,) = json.loads(capfd.readouterr().out)["diagnostics"]
    assert words in told["summary"]
