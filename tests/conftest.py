"""Options of the whole test suite."""

from __future__ import annotations

import os

import pytest

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
