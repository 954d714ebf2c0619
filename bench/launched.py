"""Starting the workers that a soak breaks as `shipway launch` does: supervisor, torchrun, ranks.

The supervisor starts again by itself what was killed; what was asked to stop is launched again. A start with
another number of processes is one by hand, as the head of a build's `launch/local.sh` says, once the
supervisor is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.breaking import START_SECONDS, Job
from bench.starts import Torchrun, living_ranks
from shipway.runtime.attempts import next_number
from shipway.runtime.build_folder import read_plan
from shipway.schemas.run import ATTEMPTS_FILE

LAUNCH = """
import sys
from pathlib import Path
from shipway.compiler.launch.launch import Launch, prepare, start
build, run = map(Path, sys.argv[1:])
ready = prepare(build, run.parent, run_id=run.name)
sys.exit(start(ready).code if isinstance(ready, Launch) else str(ready.diagnostics))
"""
"""What `shipway launch BUILD` runs for a run of a given name."""
LOOK_SECONDS = 0.02


@dataclass
class Launcher:
    """The supervisor of one run, which outlives the moments that it recovers from by itself."""

    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    """The client, which is there as long as the supervisor."""
    seen: int = 0
    """Number of the last attempt that was waited for: the supervisor may have begun the next one by now."""

    def __call__(self, build: Path, run: Path, processes: int, attempt: int) -> Job:
        """The next attempt: the supervisor's own, that of a new one, or one by hand."""
        if processes == read_plan(build).stages[0].layout.world_size:
            if not self.lives():
                self.seen = next_number(run) - 1
                self._launch(build, run)
            return Launched(self, run, self.seen)
        self.close()
        return Torchrun(build, run, processes, next_number(run))

    def lives(self) -> bool:
        """Whether there is a supervisor."""
        return self.process is not None and self.process.poll() is None

    def close(self) -> None:
        """Stop the supervisor, as a user would."""
        if self.process is not None and self.lives():
            self.process.send_signal(signal.SIGTERM)  # the client passes it on
            self.process.wait(START_SECONDS)

    def _launch(self, build: Path, run: Path) -> None:
        command = [sys.executable, "-c", LAUNCH, str(build), str(run)]
        with (run / "launch.log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )


@dataclass
class Launched:
    """One attempt of a supervisor: the first after attempt number `after`."""

    launcher: Launcher
    run: Path
    after: int
    _asked: bool = False

    def pids(self) -> list[int]:
        """Of the ranks that live."""
        return living_ranks(self._folder)

    def supervisor(self) -> int:
        """Process id: not the client's, which waits for it."""
        return int((self.run / "supervisor.pid").read_text().split()[0])

    def ask_to_stop(self, number: signal.Signals) -> None:
        """The supervisor is told."""
        self._asked = True
        os.kill(self.supervisor(), number)

    def wait(self) -> int:
        """The attempt's exit code, once it is over: the supervisor writes it down, or has gone."""
        until = time.monotonic() + START_SECONDS
        while (code := self._code()) is None and (self.launcher.lives() or self.pids()):
            if time.monotonic() > until:
                raise AssertionError(f"attempt {self.after + 1} of {self.run} did not end")
            time.sleep(LOOK_SECONDS)
        self.launcher.seen = self.after + 1
        assert self.launcher.process is not None
        if self._asked or code in (None, 0):
            self.launcher.process.wait(START_SECONDS)
        return self.launcher.process.returncode if code is None else code

    @property
    def _folder(self) -> Path:
        return self.run / "attempts" / str(self.after + 1)

    def _code(self) -> int | None:
        """As written down."""
        path = self.run / ATTEMPTS_FILE
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry["number"] == self.after + 1:
                    return int(entry["exit_code"])
        return None
