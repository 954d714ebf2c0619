"""Breaking a run: what is done to it at which moment, and where it stands afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

ASKED = ("sigterm", "sigusr1", "sigterm to one rank")
KILLED = ("kill one rank", "kill all ranks", "kill all while saving", "kill all while starting", "full disk")
KINDS = (*KILLED, *ASKED)
SUPERVISOR = "kill the supervisor"
"""Of a launched run: its workers save and end."""
LOSE_NOTHING = (*ASKED, SUPERVISOR)
FULL_DISK_BYTES = 60_000
"""When the disk is full no file may grow beyond metrics.jsonl by more than this: less than a shard has."""
START_SECONDS = 300.0


class Job(Protocol):
    """One start of the workers."""

    def pids(self) -> list[int]:
        """Process ids of the ranks that are there, in rank order."""

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Send a signal to whoever passes it on to all ranks."""

    def supervisor(self) -> int:
        """Process id of whoever starts it again; raises where nobody does."""

    def wait(self) -> int:
        """The exit code, once all ranks have ended."""


@runtime_checkable
class Closes(Protocol):
    """A start that leaves something behind."""

    def close(self) -> None:
        """End it."""


Start = Callable[[Path, Path, int, int], Job]
"""Of a build, in a run's folder, with so many processes, as attempt number n."""


@dataclass(frozen=True)
class Moment:
    """When and how a run is broken, drawn from the seed."""

    number: int
    kind: str
    step: int
    """It happens after this step..."""
    delay: float
    """... and this share of a step's time, or of the time that a start takes."""
    rank: int
    layout: str
    """In which the run goes on up to this moment."""


@dataclass(frozen=True)
class Outcome:
    """What a moment did."""

    moment: Moment
    exit_code: int
    finished_step: int
    """Last step that was finished before the end."""
    resumed_step: int
    """Step that the next start goes on from."""
    torn: tuple[str, ...]
    """Checkpoints that the end left unfinished or damaged."""

    @property
    def lost_steps(self) -> int:
        """Finished steps that had to be made again."""
        return self.finished_step - self.resumed_step


def draw(
    moments: int, seed: int, steps: int, layouts: Sequence[str], kinds_of: Sequence[str] = KINDS
) -> list[Moment]:
    """Moments of one run: each somewhere in its own stretch of the run, every kind before any comes again."""
    chance = random.Random(f"{seed} {'/'.join(layouts)}")
    kinds: list[str] = []
    while len(kinds) < moments:
        kinds += chance.sample(kinds_of, len(kinds_of))
    stretch = (steps - 1) / moments
    drawn = []
    for number in range(moments):
        step = int(number * stretch + chance.random() * stretch) + 1
        others = [name for name in layouts if not drawn or name != drawn[-1].layout] or list(layouts)
        layout = chance.choice(others)
        drawn.append(Moment(number + 1, kinds[number], step, chance.random(), chance.randrange(8), layout))
    return drawn


class Soak:
    """One run that is broken again and again, in a folder that remembers how far it came."""

    def __init__(
        self,
        run: Path,
        builds: Mapping[str, Path],
        processes: Mapping[str, int],
        moments: list[Moment],
        start: Start,
    ) -> None:
        """`builds` and their numbers of `processes` are by layout; the first is the one to end in."""
        self.run = run
        self.builds = builds
        self.moments = moments
        self._processes = processes
        self._start = start
        self._memory = run / "soak.json"

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the moments behind us."""
        if not self._memory.exists():
            return []
        entries = json.loads(self._memory.read_text())
        return [Outcome(Moment(**e.pop("moment")), torn=tuple(e.pop("torn")), **e) for e in entries]

    def next(self) -> bool:
        """Go through the next moment, or to the run's end; False when that is behind us."""
        done = self.outcomes
        if len(done) == len(self.moments):
            if finished(self.run):
                return False
            code = self._job(next(iter(self.builds)), len(done) + 1).wait()
            if code:
                raise AssertionError(f"the last start left with {code}")
            return True
        moment = self.moments[len(done)]
        before = stamp(self.run)
        job = self._job(moment.layout, len(done) + 1)
        try:
            inflict(moment, job, self.run, before)
            code = job.wait()
        finally:
            kill(job.pids())
        whole = whole_step(self.run)
        # A start that ended before it trained has lost none: what is recorded is the one's before.
        reached = last_step(self.run) if stamp(self.run) != before else whole
        outcome = Outcome(moment, code, reached, whole, torn(self.run))
        self._memory.write_text(json.dumps([asdict(o) for o in (*done, outcome)], indent=1))
        return True

    def close(self) -> None:
        """End what would go on by itself: a supervisor."""
        if isinstance(self._start, Closes):
            self._start.close()

    def _job(self, layout: str, attempt: int) -> Job:
        return self._start(self.builds[layout], self.run, self._processes[layout], attempt)


def inflict(moment: Moment, job: Job, run: Path, before: int) -> None:
    """Wait for the moment, and do to the run what it says; `before` stamps what was recorded before."""
    wait_for(lambda: bool(job.pids()), job)
    if moment.kind == "kill all while starting":
        time.sleep(moment.delay * 3)
        kill(job.pids())
        return
    wait_for(lambda: stamp(run) != before and last_step(run) >= moment.step, job)
    time.sleep(moment.delay * step_seconds(run))
    pids = job.pids()
    if not pids:
        return  # it has ended by itself: the moment came after the last step
    if moment.kind == "kill one rank":
        kill([pids[moment.rank % len(pids)]])
    elif moment.kind == "kill all ranks":
        kill(pids)
    elif moment.kind == "kill all while saving":
        kill_while_saving(pids, run, job)
    elif moment.kind == "full disk":
        most = (run / "metrics.jsonl").stat().st_size + FULL_DISK_BYTES
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
    elif moment.kind == "sigterm to one rank":
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[moment.rank % len(pids)], signal.SIGTERM)
    elif moment.kind == SUPERVISOR:
        os.kill(job.supervisor(), signal.SIGKILL)
    else:
        job.ask_to_stop(signal.SIGTERM if moment.kind == "sigterm" else signal.SIGUSR1)


def kill_while_saving(pids: list[int], run: Path, job: Job) -> None:
    """Freeze all ranks as soon as a checkpoint is begun and not yet finished; then kill them."""

    def caught() -> bool:
        if not unfinished(run):
            return False
        send(pids, signal.SIGSTOP)
        if unfinished(run):
            return True
        send(pids, signal.SIGCONT)  # it was finished in the meantime
        return False

    wait_for(caught, job, poll_seconds=0.001)
    kill(pids)


def unfinished(run: Path) -> list[Path]:
    """Checkpoints without a completion marker."""
    return [f for f in (run / "checkpoints").glob("step-*") if not (f / "complete.json").exists()]


def kill(pids: Sequence[int]) -> None:
    """kill -9."""
    send(pids, signal.SIGKILL)


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """A signal to processes, some of which may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_for(condition: Callable[[], bool], job: Job, poll_seconds: float = 0.02) -> None:
    """Until it holds, or the job has ended by itself."""
    until, seen = time.monotonic() + START_SECONDS, False
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"what was waited for did not come in {START_SECONDS:.0f} s")
        alive = bool(job.pids())
        if seen and not alive:
            return
        seen = seen or alive
        time.sleep(poll_seconds)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The run's steps as it recorded them."""
    from shipway.runtime.metrics import read_metrics

    return [line for line in read_metrics(run / "metrics.jsonl") if "event" not in line]


def last_step(run: Path) -> int:
    """Last step that the run has recorded."""
    steps = steps_of(run)
    return int(steps[-1]["step"]) if steps else 0


def stamp(run: Path) -> int:
    """Changes with every step that is recorded, and when a start drops those that it makes again."""
    path = run / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def step_seconds(run: Path) -> float:
    """Time of the last step."""
    return float(steps_of(run)[-1]["step_seconds"])


def whole_step(run: Path) -> int:
    """Step of the newest checkpoint that is whole: where the next start goes on."""
    from shipway.runtime.checkpoint_folder import checkpoint_folders, step_of

    return next((step_of(f) for f in checkpoint_folders(run / "checkpoints") if not _damage(f)), 0)


def torn(run: Path) -> tuple[str, ...]:
    """Checkpoints that a start passes over."""
    from shipway.runtime.checkpoint_folder import checkpoint_folders

    return tuple(folder.name for folder in checkpoint_folders(run / "checkpoints") if _damage(folder))


def _damage(folder: Path) -> str | None:
    from shipway.runtime.generation.weights import broken

    return broken(folder)


def finished(run: Path) -> bool:
    """Whether the programme is done."""
    from shipway.runtime.run_folder import RunFolder

    return RunFolder(run).read_status().get("state") == "done"


def describe(outcome: Outcome) -> str:
    """One line."""
    moment = outcome.moment
    words = f"moment {moment.number}, {moment.layout}, {moment.kind} after step {moment.step}: "
    words += f"exit {outcome.exit_code}, {outcome.finished_step} steps finished, {outcome.lost_steps} lost"
    return words + (f", torn: {', '.join(outcome.torn)}" if outcome.torn else "")
