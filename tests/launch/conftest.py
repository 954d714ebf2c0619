"""The Slurm lab, started once for all tests that need it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.launch.slurm_lab.lab import SlurmLab, hosts_entry, missing


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A running lab; skips, saying why, where there can be none."""
    if reason := missing():
        pytest.skip(reason)
    lab = SlurmLab(tmp_path_factory.mktemp("slurm"), socket.gethostname().split(".")[0])
    with hosts_entry():
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()
