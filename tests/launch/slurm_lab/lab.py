"""A real Slurm on this machine, in a folder of its own: started for the tests and stopped by them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
NODES = ("n1", "n2", "n3", "n4")
HOSTS = Path("/etc/hosts")
HOSTS_LINE = f"127.0.0.1 {' '.join(NODES)} # shipway slurm lab\n"


class SlurmLab:
    """Daemons of one lab, and the commands that talk to it."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder = folder
        self.host = host
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._lifted: dict[str, float] = {}

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command against the lab."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING; the controller keeps finished jobs for minutes."""
        for field in self.run("scontrol", "show", "job", job).stdout.split():
            if field.startswith("JobState="):
                return field.removeprefix("JobState=")
        raise AssertionError(f"no state of job {job}")

    def nodes(self, job: str) -> str:
        """Nodes of a job, separated by commas; empty while it waits."""
        listing = self.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").stdout.strip()
        return ",".join(self.run("scontrol", "show", "hostnames", listing).stdout.split()) if listing else ""

    @contextlib.contextmanager
    def as_environment(self) -> Iterator[None]:
        """Slurm's commands of this process go to the lab."""
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = self.environment["SLURM_CONF"]
        try:
            yield
        finally:
            if before is None:
                del os.environ["SLURM_CONF"]
            else:
                os.environ["SLURM_CONF"] = before

    def wait_for(self, holds: Callable[[], bool], what: str, seconds: float = 240) -> None:
        """Wait until `holds()`; jobs that a requeue delayed are started at once."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.report()}"
            self._lift_requeue_delay()
            time.sleep(0.5)

    def _lift_requeue_delay(self) -> None:
        """A requeued job waits two minutes for its nodes to settle; a test need not.

        Not at once: a start in the second of the requeue has the revoked credential of the one before.
        """
        queue = self.run("squeue", "--noheader", "--format=%i %r", check=False).stdout
        for line in queue.splitlines():
            job, _, reason = line.partition(" ")
            if reason == "BeginTime" and time.monotonic() > self._lifted.get(job, 0.0):
                self._lifted[job] = time.monotonic() + 15
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now+3", check=False)

    def report(self) -> str:
        """What a person would look at when a test hangs."""
        parts = [self.run(*command, check=False).stdout for command in (("squeue",), ("sinfo", "-N"))]
        log = self.folder / "slurmctld.log"
        return "\n".join([*parts, *log.read_text().splitlines()[-20:]] if log.exists() else parts)

    def start(self) -> None:
        """Start munged, slurmctld and a slurmd per node, and wait until all nodes are idle."""
        self._configure()
        self._spawn(
            "munged", "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket",
            f"--key-file={self.folder}/munge.key", f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munge.seed",
        )  # fmt: skip
        self.wait_for_path(self.folder / "munge.socket")
        self._spawn("slurmctld", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for node in NODES:
            self.start_node(node)
        self.wait_for(lambda: self.idle_nodes() == len(NODES), "four idle nodes", 30)

    def start_node(self, node: str) -> None:
        """Start the slurmd of one node."""
        self._spawn(node, "slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, node: str) -> None:
        """Take a node away: its slurmd and everything that it started die at once."""
        daemon = self._daemons.pop(node)
        for pid in (daemon.pid, *self._processes_on(node)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def _processes_on(self, node: str) -> list[int]:
        """Processes that jobs of this lab started on a node, with the slurmstepd above them."""
        ours = (f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.environment['SLURM_CONF']}".encode())
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if all(variable in variables for variable in ours):
                    found |= {int(folder.name), stepd_above(folder)} - {0}
        return sorted(found)

    def idle_nodes(self) -> int:
        """Nodes that could take a job now."""
        lines = self.run("sinfo", "-N", "-h", "-p", "train", "-o", "%t", check=False).stdout.split()
        return lines.count("idle")

    def stop(self) -> None:
        """Stop the daemons that this lab started, and no others."""
        self.run("scancel", "--user=root", "--state=PENDING", check=False)
        self.run("scancel", "--user=root", "--full", "--signal=KILL", check=False)
        self.run("scancel", "--user=root", check=False)
        for name in (*NODES, "slurmctld", "munged"):
            if daemon := self._daemons.pop(name, None):
                daemon.terminate()
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def wait_for_path(self, path: Path, seconds: float = 60) -> None:
        """Wait until `path` exists."""
        deadline = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} did not appear within {seconds} s"
            time.sleep(0.1)

    def _configure(self) -> None:
        ports = free_ports(len(NODES) + 1)
        values = {
            "folder": str(self.folder),
            "host": self.host,
            "port": str(ports[0]),
            "ports": ",".join(str(port) for port in ports[1:]),
        }
        for name in ("slurm.conf", "gres.conf", "cgroup.conf"):
            text = (HERE / name).read_text()
            for key, value in values.items():
                text = text.replace(f"{{{key}}}", value)
            (self.folder / name).write_text(text)
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        for index in range(8):
            os.mknod(self.folder / f"gpu{index}", 0o666 | 0o020000, os.makedev(1, 3))  # a null device

    def _spawn(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("wb")
        self._daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)


def stepd_above(folder: Path) -> int:
    """The slurmstepd that is the parent of the process in a /proc folder, or 0."""
    parent = Path("/proc") / (folder / "stat").read_text().rpartition(")")[2].split()[1]
    return int(parent.name) if (parent / "comm").read_text().startswith("slurmstepd") else 0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def missing() -> str | None:
    """Why there can be no lab here, after trying to install Slurm; None when there can."""
    if os.geteuid() != 0:
        return "the Slurm lab needs root"
    tools = ("slurmctld", "slurmd", "sbatch", "munged")
    if not all(shutil.which(tool) for tool in tools):
        if shutil.which("apt-get") is None:
            return "Slurm is not installed and there is no apt-get"
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in ("update", "install -y slurm-wlm munge"):
            subprocess.run(
                ["apt-get", "-qq", *command.split()], env=environment, capture_output=True, check=False
            )
    absent = [tool for tool in tools if not shutil.which(tool)]
    return f"could not install {', '.join(absent)}" if absent else None


@contextlib.contextmanager
def hosts_entry() -> Iterator[None]:
    """The emulated nodes' names resolve to this machine while the lab runs."""
    before = HOSTS.read_text()
    if HOSTS_LINE not in before:
        HOSTS.write_text(before + ("" if before.endswith("\n") else "\n") + HOSTS_LINE)
    try:
        yield
    finally:
        HOSTS.write_text(HOSTS.read_text().replace(HOSTS_LINE, ""))
