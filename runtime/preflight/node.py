"""One node by itself: devices, driver, links between them, network interfaces, storage."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from shipway.runtime.preflight.report import Check, NodeReport, judged, node_name
from shipway.schemas.cluster import Cluster
from shipway.schemas.plan import Plan

STORAGE_BYTES = 256 << 20
"""Written to the run's folder: enough to tell a dead mount, little enough for every node at once."""
STORAGE_BYTES_ON_CPU = 8 << 20
STORAGE_SHARE = 0.1
"""A node that writes slower than this share of its part of the plan's bandwidth gets a warning."""
QUERY = "name,driver_version,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"
INFINIBAND = Path("/sys/class/infiniband")
KFD = Path("/sys/class/kfd/kfd/topology/nodes")


def check_node(plan: Plan, folder: Path) -> NodeReport:
    """Look at this node and write `<node>.json` into `folder`."""
    cluster = plan.blueprint.cluster
    checks = (*_devices(cluster), *_links(cluster), *_interfaces(cluster), *_storage(cluster, folder))
    report = NodeReport(node=node_name(), checks=checks)
    (folder / f"{report.node}.json").write_text(report.model_dump_json(indent=1) + "\n")
    return report


def _devices(cluster: Cluster) -> Iterator[Check]:
    count = cluster.devices_per_node
    if cluster.device.kind == "cpu":
        yield judged("cores", True, str(len(os.sched_getaffinity(0))), f"{count} processes")
    elif cluster.device.kind == "rocm":
        found = sum(path.read_text().strip() != "0" for path in KFD.glob("*/gpu_id"))
        yield judged("devices", found == count, str(found), str(count))
    elif shutil.which("nvidia-smi") is None:
        yield judged("devices", False, "no nvidia-smi", f"{count} {cluster.device.name}")
    else:
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        yield from judge_devices(cluster, answer.returncode, answer.stdout or answer.stderr)


def judge_devices(cluster: Cluster, code: int, listing: str) -> Iterator[Check]:
    """Checks of nvidia-smi's listing: one line a GPU, the columns of `QUERY`."""
    if code != 0:
        yield judged("driver", False, listing.strip().replace("\n", " "))
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    yield judged(
        "devices", len(rows) == cluster.devices_per_node, str(len(rows)), str(cluster.devices_per_node)
    )
    names = sorted({row[0] for row in rows})
    device = cluster.device
    right = all(device.answers_to(name) for name in names)
    yield judged("type", right, ", ".join(names), " or ".join(device.reported_names) or device.name)
    drivers = sorted({row[1] for row in rows})
    yield judged("driver", len(drivers) == 1, ", ".join(drivers))
    broken = [f"GPU {index}: {row[2]}" for index, row in enumerate(rows) if row[2].isdigit() and int(row[2])]
    yield judged("memory errors", not broken, ", ".join(broken) or "none")
    slow = [f"GPU {index}" for index, row in enumerate(rows) if row[3] == "Active"]
    yield judged("clocks", not slow, f"{', '.join(slow)} slowed by hardware" if slow else "full")


def _links(cluster: Cluster) -> Iterator[Check]:
    device = cluster.device
    # A link no faster than the way to the host is PCIe itself, which `nvlink` does not list.
    has_links = device.kind == "cuda" and device.link_bandwidth > 1.5 * device.host_bandwidth
    if cluster.devices_per_node > 1 and has_links and shutil.which("nvidia-smi"):
        answer = subprocess.run(
            ["nvidia-smi", "nvlink", "--status"], capture_output=True, text=True, check=False
        )
        yield judge_links(cluster, answer.returncode, answer.stdout or answer.stderr)


def judge_links(cluster: Cluster, code: int, listing: str) -> Check:
    """NVLink's state from `nvidia-smi nvlink --status`: lines of links below each GPU."""
    planned = f"{cluster.device.link_bandwidth / 1e9:.0f} GB/s"
    if code != 0:
        return judged("NVLink", False, listing.strip().replace("\n", " "), planned)
    speeds: list[list[float]] = []
    inactive = []
    for line in listing.splitlines():
        if line.startswith("GPU"):
            speeds.append([])
        elif match := re.search(r"Link \d+: ([\d.]+) GB/s", line):
            speeds[-1].append(float(match.group(1)))
        elif "inactive" in line:
            inactive.append(f"GPU {len(speeds) - 1} {line.strip().split(':')[0].lower()}")
    slowest = min((sum(links) for links in speeds), default=0.0)
    # The driver counts lines' raw rate, at most some percent above the datasheet's.
    fine = not inactive and slowest >= 0.9 * cluster.device.link_bandwidth / 1e9
    found = f"{slowest:.0f} GB/s" + (f", down: {', '.join(inactive)}" if inactive else "")
    return judged("NVLink", fine, found, planned)


def _interfaces(cluster: Cluster) -> Iterator[Check]:
    if cluster.nodes > 1 and cluster.network is not None and cluster.device.kind != "cpu":
        yield judge_interfaces(cluster.network.nics_per_node, INFINIBAND)


def judge_interfaces(planned: int, infiniband: Path) -> Check:
    """Active RDMA interfaces below `infiniband`, where both InfiniBand and RoCE ones stand."""
    states = {path.parts[-4]: path.read_text() for path in sorted(infiniband.glob("*/ports/*/state"))}
    active = [name for name, state in states.items() if "ACTIVE" in state]
    down = [name for name in states if name not in active]
    found = f"{len(active)} active" + (f", down: {', '.join(down)}" if down else "")
    return judged("network interfaces", len(active) >= planned, found, str(planned))


def _storage(cluster: Cluster, folder: Path) -> Iterator[Check]:
    path = folder / f"{node_name()}.probe"
    block = os.urandom(1 << 20)
    size_bytes = STORAGE_BYTES_ON_CPU if cluster.device.kind == "cpu" else STORAGE_BYTES
    start = time.monotonic()
    try:
        with path.open("wb") as file:
            for _ in range(size_bytes >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield judged("storage", False, str(error))
        return
    finally:
        path.unlink(missing_ok=True)
    reached = size_bytes / (time.monotonic() - start)
    planned = cluster.storage.write_bandwidth / cluster.nodes
    yield Check(
        name="storage",
        outcome="ok" if reached >= STORAGE_SHARE * planned else "warning",
        found=f"{reached / 1e9:.2f} GB/s",
        planned=f"{planned / 1e9:.2f} GB/s",
    )
