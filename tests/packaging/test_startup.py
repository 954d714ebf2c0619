"""What a command costs before it starts, counted in imported modules: a clock lies on a busy machine."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "tensorboard", "pyarrow", "tokenizers", "pandas", "IPython")


def modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has imported after running `code`."""
    probe = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: sys.stderr.write('\\nMODULES ' + json.dumps(sorted(sys.modules)) + '\\n'))\n"
    )
    done = subprocess.run([sys.executable, "-c", probe + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("MODULES "))
    return set(json.loads(line.removeprefix("MODULES ")))


def run_cli(*arguments: str) -> str:
    """Code that runs a command line as the installed script does."""
    return f"""
import sys
sys.argv = ["shipway", *{list(arguments)!r}]
from shipway.compiler.cli import main
try:
    main()
except SystemExit as leave:
    assert not leave.code
"""


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--help"), ("data", "--help"), ("--version",)])
def test_help_imports_little(arguments: tuple[str, ...]) -> None:
    """Below 0.3 s on an ordinary laptop: of what a plan needs, nothing is there yet but Typer."""
    modules = modules_after(run_cli(*arguments))
    heavy = (*HEAVY, "numpy", "pydantic", "rich", "yaml", "omegaconf", "hydra", "networkx", "jinja2")
    assert [name for name in heavy if name in modules] == []
    assert [name for name in modules if name.startswith(("shipway.schemas.", "shipway.runtime."))] == []
    assert len(modules) < 400


def test_a_plan_imports_no_torch() -> None:
    modules = modules_after(run_cli("plan", "tiny", "--json"))
    assert [name for name in HEAVY if name in modules] == []
    assert not any(name.startswith("shipway.runtime") for name in modules)
