"""One supervisor a run: a lock that the system lets go of when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from shipway.runtime.exit_codes import Fatal

PID_FILE = "supervisor.pid"


class RunLock:
    """Holds a run's folder; `supervisor.pid` says who, for people and for `shipway status`."""

    def __init__(self, run: Path) -> None:
        self._pid_file = run / PID_FILE
        self._lock = (run / "supervisor.lock").open("a")

    def take(self) -> None:
        """Take the lock; raises Fatal when another process holds it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fatal(f"{self._pid_file.parent} is running already ({self._holder()})") from None
        except OSError:
            pass  # a file system without locks: `launch` has looked at the process id before
        self._pid_file.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")

    def release(self) -> None:
        """Let go; the lock's file stays, as removing it would let two processes lock two files."""
        self._pid_file.unlink(missing_ok=True)
        self._lock.close()

    def _holder(self) -> str:
        try:
            pid, *host = self._pid_file.read_text().split()
        except (OSError, ValueError):
            return "its process is just starting"
        return f"process {pid} on {host[0]}" if host else f"process {pid}"
