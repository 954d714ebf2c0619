"""Training on this machine: starts the workers, and starts them again after a failure that may pass.

    python -m shipway.runtime.supervisor BUILD --run-dir runs/ID

Restarts on preemption and on retryable failures, never on fatal ones, and not without progress. One
Ctrl-C (or TERM, USR1) lets the workers save and leave; a Ctrl-C after that kills them, a TERM does not: who
asks twice to save has not asked to lose steps. A terminal that goes away ends nothing. The exit code is the
last attempt's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from shipway.runtime.attempts import (
    append_attempt,
    end_strays,
    explain,
    explain_stop,
    kill_workers,
    next_number,
)
from shipway.runtime.build_folder import read_plan
from shipway.runtime.echo import STREAMS, Echo
from shipway.runtime.exit_codes import ExitCode, Fatal
from shipway.runtime.lock import RunLock
from shipway.runtime.report import try_report
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.terminal import VARIABLE as TERMINAL
from shipway.runtime.terminal import terminal_here
from shipway.schemas.plan import Plan
from shipway.schemas.run import HALT_FILE, Attempt

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
WAKE_SECONDS = 0.5
"""Longest time that a request to stop goes unheard."""
AGENT_FILE = "agent.pid"
"""File of an attempt with the id of the process that starts its workers."""
STOPPED = "stopped"
"""State of a run, and reason of its attempt, that ended because it was asked to."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def say(text: str) -> None:
    """Print at once; nobody may be there to read it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


@dataclass
class Supervisor:
    """One run on this machine."""

    plan: Plan
    build: Path
    run: RunFolder
    extra: Sequence[str] = ()
    """Further arguments of shipway.runtime.main."""
    say: Callable[[str], None] = say
    stop_requests: int = 0
    _child: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _number: int = 0
    _told: bool = False

    def supervise(self) -> ExitCode:
        """Run attempts until the programme is done or must not go on."""
        failures = 0
        pause_seconds = FIRST_PAUSE_SECONDS
        while True:
            progress = self._step()
            code = self._attempt()
            if self._step() > progress:
                failures, pause_seconds = 0, FIRST_PAUSE_SECONDS
            if not code.restarts or self.stop_requests:
                return code
            failures += 1
            limit = self.plan.blueprint.training.faults.restarts
            if failures > limit:
                self.say(f"stopping: {limit} restarts in a row finished no step")
                return ExitCode.NO_PROGRESS
            self.say(f"starting again in {pause_seconds:.0f} s")
            self._pause(pause_seconds)
            pause_seconds = min(LONGEST_PAUSE_SECONDS, 2 * pause_seconds)
            if self.stop_requests:
                return code

    def install_signals(self) -> None:
        """Take over the stop signals, those held back since the start too, and outlive the terminal."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        signal.signal(signal.SIGHUP, _leave_terminal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, child = not self.stop_requests, self._child  # before another signal can come in between
        self.stop_requests += 1
        if first:
            self.say("stopping: the workers save at the end of this step (Ctrl-C to kill them)")
            self._tell_to_stop()
        elif number == signal.SIGINT and child is not None:
            self.say("killing the workers")
            kill_workers(self.run.path / "attempts" / str(self._number))
            child.kill()

    def _tell_to_stop(self) -> None:
        """Pass the request on, once: a second signal would disturb the agent while the workers save."""
        if self._child is not None:
            told, self._told = self._told, True
            if not told:
                self._child.send_signal(signal.SIGTERM)

    def _attempt(self) -> ExitCode:
        self._number = next_number(self.run.path)
        folder = self.run.path / "attempts" / str(self._number)
        folder.mkdir(parents=True, exist_ok=True)
        started_at = now()
        self.run.write_status(state="running", attempt=self._number, reason="")
        terminal = terminal_here()
        echo = Echo(folder / "logs", files=STREAMS if terminal is None else ("stderr.log",))
        echo.start()
        environment = self._environment(folder, terminal)
        # A session of its own: Ctrl-C on the terminal reaches the supervisor alone, which decides.
        self._child = subprocess.Popen(self.command(folder), env=environment, start_new_session=True)
        with contextlib.suppress(OSError):
            (folder / AGENT_FILE).write_text(f"{self._child.pid}\n")
        if self.stop_requests:  # asked while the process was made, when there was none to tell
            self._tell_to_stop()
        returned = _ended(self._child)
        self._child = None
        (folder / AGENT_FILE).unlink(missing_ok=True)
        kill_workers(folder)
        echo.finish()
        code = self._code(returned)
        killed = self.stop_requests > 1 and returned == -signal.SIGKILL
        if self.stop_requests and (killed or code is ExitCode.PREEMPTED):
            words, reason = STOPPED, explain_stop(folder, killed=killed)
            self.say(f"attempt {self._number} stopped as asked: {reason}")
        else:
            words, reason = code.words, explain(folder, code)
            if code is not ExitCode.DONE:
                self.say(f"attempt {self._number} ended ({words}): {reason}")
        append_attempt(self.run.path, self._record(started_at, code, words))
        self.run.write_status(state=words, reason=reason)
        try_report(self.run.path)
        return code

    def _environment(self, folder: Path, terminal: str | None) -> dict[str, str]:
        """The workers'; on a terminal rank 0 shows steps itself, else the echo of its log does."""
        threads = max(1, (os.cpu_count() or 1) // self._processes)
        defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        owned = {
            "SHIPWAY_ATTEMPT": str(self._number),
            "SHIPWAY_ATTEMPT_FOLDER": str(folder),
            "SHIPWAY_SUPERVISOR": str(os.getpid()),
        }
        return defaults | os.environ | owned | ({TERMINAL: terminal} if terminal else {})

    def _code(self, returned: int) -> ExitCode:
        if self.stop_requests and returned == -signal.SIGTERM:
            return ExitCode.PREEMPTED  # our own signal, before the agent could pass it on
        return ExitCode(returned) if returned in set(ExitCode) else ExitCode.RETRYABLE

    def command(self, folder: Path) -> list[str]:
        """What one attempt runs: every rank writes to the attempt's folder, of which rank 0 is echoed."""
        return [
            *(sys.executable, "-m", "shipway.runtime.elastic"),
            *("--nproc-per-node", str(self._processes)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "0"),
            *("--log-dir", str(folder / "logs"), "--redirects", "3"),
            *("-m", "shipway.runtime.main", str(self.build), "--run-dir", str(self.run.path), *self.extra),
        ]

    @property
    def _processes(self) -> int:
        return self.plan.stages[0].layout.world_size

    def _step(self) -> int:
        return int(self.run.read_status().get("step", 0))

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop_requests:
            time.sleep(min(0.1, seconds))

    def _record(self, started_at: str, code: ExitCode, reason: str) -> Attempt:
        stage = str(self.run.read_status().get("stage", ""))
        return Attempt(
            number=self._number,
            stage=stage,
            job=str(os.getpid()),
            nodes=os.uname().nodename,
            started_at=started_at,
            ended_at=now(),
            exit_code=int(code),
            reason=reason,
        )


def _ended(child: subprocess.Popen[bytes]) -> int:
    """Wait for a process, and wake up meanwhile: the kernel may hand a signal to another thread, and Python
    would run its handler only once this thread, asleep in a call of the system, is awake."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=WAKE_SECONDS)


def _leave_terminal(number: int, frame: FrameType | None) -> None:
    """The terminal is gone: the run goes on, and what would be printed has no place to go."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise a run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="shipway.runtime.supervisor", description=__doc__)
    parser.add_argument("build", type=Path, help="folder that `shipway build` wrote")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run, new or old")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda where there is one")
    options = parser.parse_args(arguments)
    run = RunFolder(options.run_dir.resolve())
    try:
        plan = read_plan(options.build)
        check_same_plan(plan, run)
        lock = RunLock(run.path)
        lock.take()
    except Fatal as error:
        print(error, file=sys.stderr)
        return int(ExitCode.FATAL)
    except OSError as error:
        print(f"{run.path} cannot be used: {(error.strerror or 'error').lower()}", file=sys.stderr)
        return int(ExitCode.FATAL)
    extra = ("--device", options.device) if options.device else ()
    supervisor = Supervisor(plan, options.build.resolve(), run, extra)
    supervisor.install_signals()
    try:
        shutil.copyfile(options.build / "plan.json", run.path / "plan.json")
        end_strays(run.path, supervisor.say)
        code = supervisor.supervise()
        if supervisor.stop_requests and code is not ExitCode.DONE and code.restarts:
            say(f"continue with {ways_to_continue(options.build, run.path)}")
        return int(code)
    finally:
        lock.release()


def ways_to_continue(build: Path, run: Path) -> str:
    """Commands that bring a run back, as they are typed where this process was started."""
    usual = run.parent == Path.cwd() / "runs"
    launch = ["shipway", "launch", _typed(build), *(() if usual else ("--runs", _typed(run.parent)))]
    resume = ["shipway", "resume", run.name if usual else _typed(run)]
    return f"`{shlex.join(launch)}` or `{shlex.join(resume)}`"


def _typed(path: Path) -> str:
    whole = path.resolve()
    return str(whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole)


def check_same_plan(plan: Plan, run: RunFolder) -> None:
    """Refuse to continue a run under another plan, or to start what was halted."""
    run.path.mkdir(parents=True, exist_ok=True)
    if (run.path / HALT_FILE).exists():
        raise Fatal(f"{run.path / HALT_FILE} is there, so nothing may start; `shipway resume` lifts it")
    if (run.path / "plan.json").exists() and read_plan(run.path).hash != plan.hash:
        raise Fatal(f"{run.path} is a run of another plan: start a new one (--new), or build that plan again")


if __name__ == "__main__":
    sys.exit(main())
