"""A build against the cluster that it names, from here: what `shipway doctor BUILD` finds."""

from __future__ import annotations

from pathlib import Path

from shipway.compiler.environment import Finding
from shipway.compiler.launch.execute import execute
from shipway.compiler.launch.job import programme
from shipway.compiler.launch.launch import Refusal, read_plan
from shipway.compiler.launch.target import Command
from shipway.compiler.launch.targets import target_named


def probe(build: Path) -> list[Finding] | Refusal:
    """What `launch` would refuse, then the cluster's own answers; a refusal when there is no whole plan."""
    plan = read_plan(build)
    if isinstance(plan, Refusal):
        return plan
    jobs = programme(plan)
    target = target_named(jobs.cluster.target.kind)
    topic = f"target {jobs.cluster.target.kind}"
    refused = target.check(jobs, build.resolve())
    if refused:
        return [
            Finding(topic, "problem", f"{found.code}: {found.summary}. {found.help}") for found in refused
        ]
    asked = [_asked(command) for command in target.probe(jobs, build.resolve())]
    return [Finding(topic, "ok", "nothing here keeps a launch from working"), *asked]


def _asked(command: Command) -> Finding:
    code, output = execute(command)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if code == 0:
        return Finding("cluster", "ok", command.purpose)
    said = f": {lines[-1]}" if lines else ""
    return Finding("cluster", "problem", f"not so: {command.purpose}{said}")
