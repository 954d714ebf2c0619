"""Which class serves which kind of target; a new target is one file, its templates, and a line here."""

from __future__ import annotations

from shipway.compiler.launch.aihc import Aihc
from shipway.compiler.launch.kubernetes import Kubernetes
from shipway.compiler.launch.local import Local
from shipway.compiler.launch.slurm import Slurm
from shipway.compiler.launch.ssh import Ssh
from shipway.compiler.launch.target import Target


def target_named(kind: str) -> Target:
    """The target that serves `cluster.target.kind`."""
    targets: dict[str, Target] = {
        "local": Local(),
        "slurm": Slurm(),
        "kubernetes": Kubernetes(),
        "aihc": Aihc(),
        "ssh": Ssh(),
    }
    return targets[kind]
