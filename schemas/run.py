"""The record of a run: what was launched, and every attempt at it. It outlives the client that launched."""

from typing import Literal

from shipway.schemas.base import Schema

RECORD_FILE = "run.json"
"""Name of the record in a run's folder."""
ATTEMPTS_FILE = "attempts.jsonl"
"""Where each attempt is written down when it ends, one a line."""
HALT_FILE = "halt"
"""While a run's folder has this file, nothing starts it again: a fatal code, or the user, said stop."""


class Job(Schema):
    """One job that a scheduler was given."""

    stage: str
    """Training stage, or `all` where one job runs the whole programme."""
    id: str
    """The scheduler's name for it."""


class RunRecord(Schema):
    """`run.json` in a run's folder."""

    format: Literal[1] = 1
    id: str
    """Name of the run's folder."""
    name: str
    """Name of the blueprint."""
    plan_hash: str
    """Hash of the plan that runs."""
    target: str
    """Kind of target: local, slurm, kubernetes, aihc, ssh."""
    build: str
    """Build folder, absolute."""
    launched_at: str
    """When it was launched or last resumed, ISO 8601 in UTC."""
    launches: int = 1
    """Times that it was launched or resumed."""
    jobs: tuple[Job, ...] = ()
    """Jobs of the latest launch, in the order they run."""


class Attempt(Schema):
    """One line of `attempts.jsonl`: one start of the workers, written when it ended."""

    number: int
    """From 1 over the whole run."""
    stage: str
    job: str
    """The scheduler's name for the job."""
    nodes: str
    """Nodes it ran on, in the scheduler's notation."""
    started_at: str
    ended_at: str
    exit_code: int
    """One of the reserved codes, or what else the workers left with."""
    reason: str
    """done, preempted, retryable, fatal, no progress, preflight, stopped, lost (nobody was left to say)."""
