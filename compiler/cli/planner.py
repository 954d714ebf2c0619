"""The planner, loaded in a process of its own while this one reads the command line and the blueprint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from shipway.compiler.forked import ahead
from shipway.compiler.frozen import frozen

if TYPE_CHECKING:
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


Planner = Callable[[Asked, Callable[[], object]], "Plan | list[Diagnostic]"]
"""Makes a plan, once; while it does, something else can be done."""

OTHERWISE = frozenset({"--help", "--serving", "--dump-after"})
"""Options of `shipway plan` that the planner is not asked with."""


def planner() -> AbstractContextManager[Planner]:
    """The planner, which loads from now on."""
    return ahead(_load)


def planner_for(arguments: Sequence[str]) -> AbstractContextManager[Planner | None]:
    """The planner where a command line asks for a plan: it loads before anything else does."""
    asks = list(arguments[:1]) == ["plan"] and OTHERWISE.isdisjoint(arguments)
    return planner() if asks else nullcontext()


def _load() -> Callable[[Asked], Plan | list[Diagnostic]]:
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
