"""The planner that loads in another process makes the plans that one in this process makes."""

import subprocess
import sys
from contextlib import nullcontext

import pytest

from shipway.compiler import forked
from shipway.compiler.cli.app import run
from shipway.compiler.cli.planner import planner_for

TYPED = [sys.executable, "-c", "from shipway.compiler.cli import main; main()"]


def test_plans_are_the_same_in_one_process_and_in_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = subprocess.run([*TYPED, "plan", "tiny", "--json"], capture_output=True, text=True, check=True)
    monkeypatch.setattr(forked, "cores", lambda: 1)
    assert run(["plan", "tiny", "--json"]) == 0
    assert capsys.readouterr().out == typed.stdout


def test_the_planner_loads_at_once_only_for_a_command_that_asks_it() -> None:
    for words in ([], ["show", "k3"], ["plan", "--help"], ["plan", "k3", "--serving"]):
        assert isinstance(planner_for(words), nullcontext)
    assert not isinstance(planner_for(["plan", "k3"]), nullcontext)


def test_the_process_that_was_typed_forks_before_the_command_line_is_read_and_loads_no_search() -> None:
    program = """
import sys
from shipway.compiler import forked
from shipway.compiler.cli import main

asked = []
forked.cores = lambda: 2
forked.may_fork = lambda: asked.append("typer" in sys.modules) or True
sys.argv = ["shipway", "plan", "tiny", "--quiet"]
try:
    main()
except SystemExit as done:
    print(done.code, asked, "numpy" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "0 [False] False\n"
