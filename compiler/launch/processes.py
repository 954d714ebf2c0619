"""Processes of a run on this machine, by the ids that they left in its folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from shipway.compiler.frozen import frozen

SUPERVISORS = {"supervisor.pid": "shipway.runtime.supervisor", "driver.pid": "ssh/run.sh"}
"""Who may lead a run, by the file with its id, and what its command line says."""
WORKER = "shipway.runtime.main"
AGENT = "shipway.runtime.elastic"


@frozen
class Leader:
    """The process that leads a run, here or on another machine."""

    pid: int
    host: str
    here: bool
    """Whether it can be looked at and told from this machine."""


def leader(folder: Path) -> Leader | None:
    """The supervisor or driver of a run, or None; one on another machine is taken at its word."""
    for name, words in SUPERVISORS.items():
        try:
            first, *rest = (folder / name).read_text().split()
            pid = int(first)
        except (OSError, ValueError):
            continue
        host = rest[0] if rest else socket.gethostname()
        here = host == socket.gethostname()
        if not here or _is(pid, words):
            return Leader(pid, host, here)
    return None


def stray_workers(folder: Path) -> list[int]:
    """Workers on this machine that still train."""
    return _running(folder, "rank*.pid", WORKER)


def agents(folder: Path) -> list[int]:
    """Processes on this machine that start workers, and end when those have ended."""
    return _running(folder, "agent.pid", AGENT)


def _running(folder: Path, files: str, words: str) -> list[int]:
    found = []
    for path in folder.glob(f"attempts/*/{files}"):
        try:
            pid = int(path.read_text())
        except (OSError, ValueError):
            continue
        if _is(pid, words):
            found.append(pid)
    return sorted(found)


def _is(pid: int, words: str) -> bool:
    """Whether process `pid` is there and its command line has `words`: numbers are given out again."""
    try:
        return words.encode() in Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        if Path("/proc/self").exists():
            return False
    try:  # no /proc: a laptop's macOS
        os.kill(pid, 0)
    except OSError:
        return False
    return True
