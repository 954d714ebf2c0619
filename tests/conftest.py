"""Options of the whole test suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shipway.runtime.imports import uncollected_imports

# What a caller's terminal asks for must not change what the tests read.
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
    os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the code produces now over the golden copies; review the difference as code",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden copies are to be written anew."""
    return bool(request.config.getoption("--update-golden"))


# Files that run many processes or wait for daemons, the longest first: begun last, one of them would run
# alone at the end.
LONG = (
    "launch/test_slurm.py",
    "launch/test_ssh.py",
    "runtime/test_parallel_pipeline.py",
    "runtime/test_parallel_expert.py",
    "runtime/test_resume.py",
    "runtime/test_parallel_context.py",
    "runtime/test_parallel_tensor.py",
    "bench/test_soak.py",
    "operators/test_collectives.py",
    "runtime/test_supervisor.py",
    "generation/test_generation.py",
    "runtime/test_float8.py",
    "runtime/test_compilation.py",
    "runtime/test_data_parallel.py",
    "runtime/test_average.py",
    "runtime/test_parity.py",
    "runtime/test_parallel_pictures.py",
    "runtime/test_seesaw.py",
    "runtime/test_observability.py",
    "interchange/test_interchange.py",
    "operators/test_saved.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    rank = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The test files import torch and all the rest."""
    with uncollected_imports():
        return (yield)
