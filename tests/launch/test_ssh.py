"""The ssh target against a real sshd on this machine: two hosts train, are stopped, and go on."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shipway.compiler.launch import record
from shipway.compiler.launch.ssh import Ssh
from tests.launch.builds import SHORT, TWO_NODES, built, jobs_of
from tests.launch.slurm_lab.lab import free_ports

SSHD = "/usr/sbin/sshd"


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


def overrides(server: Server, workdir: Path) -> tuple[str, ...]:
    """The demo's two processes on two names of this machine."""
    return (
        *TWO_NODES,
        *SHORT,
        "cluster.target.kind=ssh",
        "+cluster.target.hosts=[127.0.0.1, localhost]",
        f"+cluster.target.workdir={workdir}",
        f"+cluster.target.python={sys.executable}",
        f"+cluster.target.options={server.options}",
    )


def test_two_hosts_train_are_stopped_and_go_on(sshd: Server, tmp_path: Path) -> None:
    build = built(tmp_path / "build", "tiny", *overrides(sshd, tmp_path / "there"))
    run, there = tmp_path / "runs" / "r", tmp_path / "there" / "runs" / "r"
    script = ["bash", str(build / "launch" / "ssh" / "run.sh"), str(run)]

    with (tmp_path / "first").open("wb") as log:
        driver = subprocess.Popen(script, stdout=log, stderr=log)
        deadline = time.monotonic() + 300
        while driver.poll() is None and (record.read_progress(there) is None):
            assert time.monotonic() < deadline, (tmp_path / "first").read_text()
            time.sleep(0.2)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(300) == 75, (tmp_path / "first").read_text()
    assert [a.reason for a in record.read_attempts(run)] == ["stopped"]
    saved = record.read_progress(there)
    assert saved is not None

    record.lift_halt(run)
    record.lift_halt(there)
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(a.stage, a.reason) for a in record.read_attempts(run)] == [("long", "stopped"), ("long", "done")]
    steps = [json.loads(line)["step"] for line in (there / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 17))
    assert "[127.0.0.1] " in done.stdout
    assert "[localhost] " in done.stdout


def test_the_script_has_the_hosts_and_nothing_secret(sshd: Server, tmp_path: Path) -> None:
    files = Ssh().render(jobs_of("tiny", *overrides(sshd, tmp_path)))
    assert "hosts=(127.0.0.1 localhost)" in files["ssh/run.sh"]
    assert "PRIVATE KEY" not in files["ssh/run.sh"]
