"""The planner, loaded in a process of its own while this one still reads the blueprint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from shipway.compiler.forked import ahead
from shipway.compiler.frozen import frozen

if TYPE_CHECKING:
    from shipway.compiler.cli.output import Output
    from shipway.schemas.blueprint import Blueprint
    from shipway.schemas.calibration import Calibration
    from shipway.schemas.diagnostics import Diagnostic
    from shipway.schemas.plan import Plan


@frozen
class Asked:
    """What the planner is asked, see `make_plan`."""

    blueprint: Blueprint
    origin: tuple[str, ...]
    folder: str
    figures: Calibration | None


Planner = Callable[[Asked], "Plan | list[Diagnostic]"]


def planner(output: Output) -> AbstractContextManager[Planner]:
    """What makes a plan, once; `output` prepares to show it meanwhile."""
    return ahead(_load, output.prepare)


def _load() -> Planner:
    with _one_blas_thread():
        from shipway.compiler.pipeline import make_plan

    return lambda asked: make_plan(
        asked.blueprint, asked.origin, folder=asked.folder, calibration=asked.figures
    )


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """NumPy's BLAS, where it is loaded in here, starts no threads: they would only spin beside the search.

    What is started later finds the environment as it was.
    """
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
