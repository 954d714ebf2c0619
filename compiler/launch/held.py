"""One launch of a run at a time: a lock that the system lets go of when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Busy(Exception):  # noqa: N818 - says what the run is
    """Another process is launching this run."""


@contextlib.contextmanager
def held(folder: Path, *, fresh: bool) -> Iterator[None]:
    """Make the run's folder and hold it while it is launched; raises Busy, or OSError.

    A `fresh` run's folder must not be there yet: two launches in one second choose one name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=not fresh)
    except FileExistsError:
        if folder.is_dir():
            raise Busy(folder.name) from None
        raise
    with (folder / "launch.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(folder.name) from None
        except OSError:
            pass  # a file system without locks
        yield
