"""The ssh target against a real sshd on this machine: two hosts train, are stopped, fail, and go on.

One test trains; the others have workers that end as they are told, since what the driver makes of it matters.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shipway.compiler.launch import record
from shipway.compiler.launch.processes import leader
from shipway.compiler.launch.ssh import Ssh
from tests.launch.builds import SHORT, TWO_NODES, built, jobs_of
from tests.launch.secrets import SECRET, files_with
from tests.launch.slurm_lab.lab import free_ports

SSHD = "/usr/sbin/sshd"
QUICK = ("model.layers=4", "training.stages.0.tokens=1536", "training.stages.1.tokens=256")
"""Six steps and one: hosts are what is tested."""


@dataclass(frozen=True)
class Server:
    """An sshd of the test's own."""

    port: int
    options: str
    """Options that reach it, as a blueprint lists them."""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """sshd with keys, port and settings of its own; skips, saying why, where there can be none."""
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("sshd")
    (port,) = free_ports(1)
    for key in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    settings = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": folder / "pid",
        "AuthorizedKeysFile": folder / "authorized", "StrictModes": "no", "PermitRootLogin": "yes",
        "UsePAM": "no", "MaxStartups": 100,
    }  # fmt: skip
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    log = (folder / "log").open("wb")
    daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stdout=log, stderr=log)
    words = ["-p", port, "-i", folder / "user", "-oStrictHostKeyChecking=no"]
    words += ["-oUserKnownHostsFile=/dev/null", "-oLogLevel=ERROR"]
    try:
        yield Server(port, "[" + ", ".join(f"'{word}'" for word in words) + "]")
    finally:
        daemon.terminate()
        daemon.wait()


def missing() -> str | None:
    """Why there can be no sshd here, after trying to install it; None when there can."""
    if os.geteuid() != 0:
        return f"sshd for another user than {getpass.getuser()} needs root"
    if not Path(SSHD).exists() and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in ("update", "install -y openssh-server openssh-client"):
            subprocess.run(
                ["apt-get", "-qq", *command.split()], env=environment, capture_output=True, check=False
            )
    return None if Path(SSHD).exists() and shutil.which("ssh") else "could not install openssh-server"


def overrides(server: Server, workdir: Path, *, hosts: str, python: str | Path) -> tuple[str, ...]:
    """The demo's two processes on hosts that are names of this machine."""
    return (
        *TWO_NODES,
        *SHORT,
        "cluster.target.kind=ssh",
        f"+cluster.target.hosts=[{hosts}]",
        f"+cluster.target.workdir='{workdir}'",
        f"+cluster.target.python='{python}'",
        f"+cluster.target.options={server.options}",
    )


def stand_in(build: Path, train: str) -> None:
    """Workers that do as `train` says in the place of training, and a driver that is in a hurry."""
    node = build / "launch" / "node.sh"
    node.write_text(f'set -eu\n[[ $1 == train ]] || exit 0\ncd "$SHIPWAY_RUN"\n{train}\n')
    driver = build / "launch" / "ssh" / "run.sh"
    driver.write_text(driver.read_text().replace("sleep 5", "sleep 0.2"))


def drive(build: Path, run: Path) -> list[str]:
    """The command of the driver."""
    return ["bash", str(build / "launch" / "ssh" / "run.sh"), str(run)]


def reasons(run: Path) -> list[str]:
    return [attempt.reason for attempt in record.read_attempts(run)]


def wait_for(holds: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 900
    while not holds():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_two_hosts_train_and_go_on_after_their_driver_was_killed(sshd: Server, tmp_path: Path) -> None:
    """The workers that it left save before others start; secrets of its environment stay there."""
    where = overrides(sshd, tmp_path / "there", hosts="127.0.0.1, localhost", python=sys.executable)
    build = built(tmp_path / "build", "tiny", *where, *QUICK)
    run, there = tmp_path / "runs" / "r", tmp_path / "there" / "runs" / "r"
    environment = {**os.environ, "HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}
    with (tmp_path / "first").open("wb") as log:
        driver = subprocess.Popen(drive(build, run), stdout=log, stderr=log, env=environment)
        wait_for(lambda: driver.poll() is not None or bool(record.read_progress(there)), tmp_path / "first")
        driver.kill()
        assert driver.wait() == -signal.SIGKILL, (tmp_path / "first").read_text()
    assert leader(run) is None

    done = subprocess.run(drive(build, run), capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(a.stage, a.reason) for a in record.read_attempts(run)] == [("long", "lost"), ("long", "done")]
    figures = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in figures if "loss" in line]
    assert steps == list(range(1, 8)), "the figures come here, no step twice, none left out"
    assert "[127.0.0.1] " in done.stdout
    assert "[localhost] " in done.stdout
    assert files_with(SECRET, tmp_path) == []


def test_a_driver_that_is_asked_to_stop_lets_the_workers_save(sshd: Server, tmp_path: Path) -> None:
    workdir = tmp_path / "there, with an ü"
    where = overrides(sshd, workdir, hosts="127.0.0.1, localhost", python=sys.executable)
    build = built(tmp_path / "a build", "tiny", *where)
    stand_in(build, "trap 'exit 75' USR1; touch here; while true; do sleep 0.1; done")
    run = tmp_path / "my runs" / "r"
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(drive(build, run), stdout=log, stderr=log)
        wait_for(lambda: driver.poll() is not None or (workdir / "runs/r/here").exists(), tmp_path / "log")
        driver.send_signal(signal.SIGHUP)  # the terminal goes away first
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120) == 75, (tmp_path / "log").read_text()
    assert reasons(run) == ["stopped"]
    assert (run / "halt").exists()
    assert not (run / "driver.pid").exists()


def test_hosts_that_fail_are_replaced_by_spare_ones_and_failures_retried(
    sshd: Server, tmp_path: Path
) -> None:
    """One host does not answer, one has a broken pre-flight; the first attempt on the others fails."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$SHIPWAY_NODE" = host1 ] && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    user = getpass.getuser()
    hosts = f"127.0.0.3, {user}@127.0.0.1, 127.0.0.1, localhost"
    build = built(
        tmp_path / "build", "tiny", *overrides(sshd, tmp_path / "there", hosts=hosts, python=python)
    )
    stand_in(build, '[[ $SHIPWAY_JOB != 1 ]] || exit 76\necho "$SHIPWAY_NODE" >> trained')
    run = tmp_path / "runs" / "r"
    done = subprocess.run(drive(build, run), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "127.0.0.3 does not answer" in done.stdout
    assert [(a.reason, a.nodes) for a in record.read_attempts(run)] == [
        ("retryable", "127.0.0.1 localhost"),
        ("done", "127.0.0.1 localhost"),
    ]
    assert (run / "exclude").read_text() == f"{user}@127.0.0.1\n"
    assert sorted((tmp_path / "there/runs/r/trained").read_text().split()) == ["host2", "host3"]


def test_a_fatal_code_ends_the_run(sshd: Server, tmp_path: Path) -> None:
    where = overrides(sshd, tmp_path / "there", hosts="127.0.0.1, localhost", python=sys.executable)
    build = built(tmp_path / "build", "tiny", *where)
    stand_in(build, "exit 77")
    run = tmp_path / "runs" / "r"
    assert subprocess.run(drive(build, run), capture_output=True, check=False).returncode == 77
    assert reasons(run) == ["fatal"]
    assert (run / "halt").read_text() == "77\n"


def test_the_script_has_the_hosts_and_nothing_secret(sshd: Server, tmp_path: Path) -> None:
    where = overrides(sshd, tmp_path, hosts="127.0.0.1, localhost", python=sys.executable)
    files = Ssh().render(jobs_of("tiny", *where))
    assert "hosts=(127.0.0.1 localhost)" in files["ssh/run.sh"]
    assert "PRIVATE KEY" not in files["ssh/run.sh"]
