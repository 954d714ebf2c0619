"""Running a target's commands on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from shipway.compiler.launch.target import Command

STDERR = 2
NOT_FOUND = 127
"""What a shell leaves with when there is no such program."""
WAKE_SECONDS = 0.5
"""Longest time that a signal goes unheard."""
UNDO_SECONDS = 60.0
"""How long an interrupted command may take to undo what it did."""


def execute(command: Command, *, quiet_stdout: bool = False) -> tuple[int, str]:
    """Run a command; returns its code and what it printed, errors only when it failed.

    A foreground command gets the terminal, or, with `quiet_stdout`, its error stream alone.
    """
    merged = {**os.environ, **command.environment}
    try:
        if command.foreground:
            return _in_foreground(command, merged, quiet_stdout), ""
        return _captured(command, merged)
    except FileNotFoundError:
        return NOT_FOUND, f"there is no {command.arguments[0]} here\n"
    except PermissionError:
        return NOT_FOUND, f"{command.arguments[0]} may not be run\n"


def _captured(command: Command, merged: dict[str, str]) -> tuple[int, str]:
    process = subprocess.Popen(
        command.arguments,
        env=merged,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = process.communicate(command.stdin)
    except KeyboardInterrupt:
        # It got the same Ctrl-C from the terminal, and takes back what it has submitted.
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(UNDO_SECONDS)
        process.kill()
        raise
    return process.returncode, out if process.returncode == 0 else out + err


def _in_foreground(command: Command, merged: dict[str, str], quiet_stdout: bool) -> int:
    """Wait for a command that may be saving: Ctrl-C reaches it from the terminal, TERM is passed on."""
    stdout = STDERR if quiet_stdout else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:  # a child inherits what is blocked
        if not command.holds_signals:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        process = subprocess.Popen(command.arguments, env=merged, stdout=stdout)
        handler = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        while True:
            try:
                # Waking up: a signal that another thread took is heard only by a thread that is awake.
                code = process.wait(timeout=WAKE_SECONDS)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                continue
            return code if code >= 0 else 128 - code
    finally:
        signal.signal(signal.SIGTERM, handler)
