"""Staying with a run until it ends, and bringing it back without the nodes that failed it.

Where the cluster's controller cannot change a job's nodes (Kubernetes), somebody must submit another job:
`shipway launch --wait` as long as it lives, `shipway resume` afterwards. Both read the same accusations.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shipway.compiler.launch.excluded import read_excluded
from shipway.compiler.launch.launch import Launch, Refusal, Started, prepare, start
from shipway.compiler.launch.runs import RunStatus, find, status

PAUSE_SECONDS = 15.0
"""Between two looks: a scheduler is not to be pestered."""
PATIENCE = 40
"""Looks in a row without an answer before the cluster counts as gone."""


def attend(
    launch: Launch, say: Callable[[str], None], *, pause_seconds: float = PAUSE_SECONDS
) -> RunStatus | Refusal:
    """Wait for the end of a run that was started; whenever it names new bad nodes, start it without them.

    Ends with the run's last status, also when a node is named that was to be left out already, or when the
    target has been brought back `cluster.target.restarts` times.
    """
    folder, silent = launch.run.folder, 0
    restarts_left = getattr(launch.programme.cluster.target, "restarts", 0)
    while True:
        found = find(folder.parent, str(folder))
        assert found is not None
        state = status(found)
        silent = silent + 1 if state.state == "unknown" else 0
        if state.state in ("running", "waiting") or 0 < silent < PATIENCE:
            time.sleep(pause_seconds)
            continue
        bad = set(state.bad_nodes) - set(read_excluded(folder))
        if state.state != "failed" or not bad or restarts_left == 0 or launch.target.keeps(sorted(bad)):
            return state
        restarts_left -= 1
        again = prepare(launch.run.build, folder.parent, run_id=folder.name)
        if isinstance(again, Refusal):
            return again
        started = start(again)
        if isinstance(started, Refusal):
            return started
        say(describe(started))
        if started.code != 0:
            return status(found)


def describe(started: Started) -> str:
    """What was started, in words."""
    jobs = [f"{job.stage}: job {job.id}" for job in started.jobs]
    without = [f"without {', '.join(started.left_out)}: failed the pre-flight"] if started.left_out else []
    return "\n".join([*without, *([started.output.rstrip()] if started.output else []), *jobs])
