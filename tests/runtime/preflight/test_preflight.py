"""The pre-flight's judgements: devices, interfaces, the verdict over nodes, slow groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.preflight.fabric import Sample, bus_bandwidth, find_devices, largest, measure, slow_nodes
from shipway.runtime.preflight.node import judge_devices, judge_interfaces, judge_links
from shipway.runtime.preflight.report import NodeReport, judged
from shipway.runtime.preflight.verdict import verdict
from shipway.schemas.cluster import Cluster
from shipway.schemas.layout import Layout
from shipway.schemas.plan import Collective
from tests.runtime.ranks import run_ranks

GOOD = "NVIDIA H100 80GB HBM3, 570.1, 0, Not Active"


@pytest.fixture
def cluster() -> Cluster:
    """One node of two H100s."""
    device = {
        "name": "H100", "reported_names": ["NVIDIA H100"], "memory": 85_000_000_000, "memory_bandwidth": 3e12,
        "peak": {"bf16": 1e15, "fp32": 1e14}, "link_bandwidth": 4e11, "host_bandwidth": 5e10,
        "source": "test",
    }  # fmt: skip
    return Cluster.from_data({"name": "c", "device": device, "nodes": 1, "devices_per_node": 2})


def failed(cluster: Cluster, *lines: str) -> list[str]:
    checks = judge_devices(cluster, 0, "\n".join(lines))
    return [check.name for check in checks if check.outcome == "failed"]


def test_a_node_as_planned_passes(cluster: Cluster) -> None:
    assert failed(cluster, GOOD, GOOD) == []


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ((GOOD,), "devices"),
        ((GOOD, GOOD.replace("H100 80GB HBM3", "A100-SXM4-80GB")), "type"),
        ((GOOD, GOOD.replace("570.1", "550.0")), "driver"),
        ((GOOD, GOOD.replace(" 0,", " 3,")), "memory errors"),
        ((GOOD, GOOD.replace("Not Active", "Active")), "clocks"),
    ],
)
def test_what_is_wrong_with_a_node_is_named(cluster: Cluster, lines: tuple[str, ...], name: str) -> None:
    assert failed(cluster, *lines) == [name]


def test_a_driver_that_does_not_answer_is_a_failure(cluster: Cluster) -> None:
    (check,) = judge_devices(cluster, 9, "couldn't communicate with the NVIDIA driver\n")
    assert (check.name, check.outcome) == ("driver", "failed")


def nvlink(*links: str) -> str:
    """What nvidia-smi prints for two GPUs with these links each."""
    lines = "".join(f"\t Link {index}: {state}\n" for index, state in enumerate(links))
    return "".join(f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-{gpu})\n{lines}" for gpu in range(2))


def test_links_as_planned_pass_and_those_that_are_down_are_named(cluster: Cluster) -> None:
    up = ["26.562 GB/s"] * 16  # 425 GB/s; the plan's is 400
    assert judge_links(cluster, 0, nvlink(*up)).outcome == "ok"
    check = judge_links(cluster, 0, nvlink(*up[1:], "<inactive>"))
    assert (check.outcome, check.planned) == ("failed", "400 GB/s")
    assert check.found.endswith("down: GPU 0 link 15, GPU 1 link 15")
    assert judge_links(cluster, 0, nvlink(*up[:8])).outcome == "failed"
    assert judge_links(cluster, 0, "").outcome == "failed"
    assert judge_links(cluster, 2, "Insufficient Permissions").found == "Insufficient Permissions"


def test_interfaces_that_are_down_are_named(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    check = judge_interfaces(2, tmp_path)
    assert (check.outcome, check.found) == ("failed", "1 active, down: mlx5_1")
    assert judge_interfaces(1, tmp_path).outcome == "ok"


def test_the_verdict_leaves_out_bad_and_silent_nodes(tmp_path: Path) -> None:
    for node, fine in (("a", True), ("b", False), ("d", True)):
        report = NodeReport(node=node, checks=(judged("devices", fine, "8", "8"),))
        (tmp_path / f"{node}.json").write_text(report.model_dump_json())
    assert verdict(tmp_path, ["a", "b", "c", "d"], need=2)
    assert (tmp_path / "exclude").read_text() == "b\nc\n"
    assert (tmp_path / "chosen").read_text() == "a\nd\n"
    assert not verdict(tmp_path, ["a", "b", "c", "d"], need=3)


def sample(group: tuple[int, ...], node: str, seconds: float) -> Sample:
    return Sample("dp_shard", "all_gather", group, node, 1 << 20, seconds, 1.0)


def test_a_node_in_a_group_much_slower_than_its_peers_is_suspected() -> None:
    samples = [sample((0, 1), "a", 1.0), sample((2, 3), "b", 5.0), sample((4, 5), "c", 1.1)]
    assert slow_nodes(samples) == ("b",)


def test_a_node_that_is_in_a_quick_group_too_is_not_suspected() -> None:
    samples = [sample((0, 2), "a", 1.0), sample((1, 3), "a", 5.0), sample((4, 6), "c", 1.0)]
    assert slow_nodes(samples) == ()


def test_the_largest_call_of_each_kind_is_measured() -> None:
    def line(axis: str, size: int, group: int = 2) -> Collective:
        return Collective(
            name="x", axis=axis, collective="all_gather", group_size=group, bytes=size, count=1,
            algorithm="ring", link="network", seconds=1.0, exposed_seconds=0.0,
        )  # fmt: skip

    kept = largest(
        [line("dp_shard", 10), line("dp_shard", 30), line("tp", 5), line("cp", 99, group=1), line("a x b", 7)]
    )
    assert [(entry.axis, entry.bytes) for entry in kept] == [("dp_shard", 30), ("tp", 5)]


def test_bus_bandwidth_is_counted_as_nccl_tests_do() -> None:
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    gather = sample((0, 1, 2, 3), "a", 1.0)
    assert bus_bandwidth(gather, 0.5) == (1 << 20) * 0.75 / 0.5
    assert bus_bandwidth(replace(gather, collective="all_reduce"), 0.5) == (1 << 20) * 1.5 / 0.5


def _groups() -> list[tuple[str, tuple[int, ...]]]:
    def line(axis: str) -> Collective:
        return Collective(
            name="x", axis=axis, collective="all_gather", group_size=4, bytes=64, count=1,
            algorithm="ring", link="network", seconds=1.0, exposed_seconds=0.0,
        )  # fmt: skip

    layout = Layout(data_parallel_shard=2, context_parallel=2)
    samples = measure(layout, [line("dp_shard"), line("data"), line("cp")], torch.device("cpu"))
    return [(sample.axis, sample.group) for sample in samples]


def test_the_ledgers_axes_are_measured_over_the_groups_that_they_mean() -> None:
    """FSDP's calls go over dp_shard and cp together, those of the step's token count over dp_shard alone."""
    seen = run_ranks(_groups, 4)
    assert dict(seen[0]) == {"world": (0, 1, 2, 3), "cp": (0, 1), "data": (0, 2), "dp_shard": (0, 1, 2, 3)}


def test_a_node_whose_torch_finds_no_device_is_named_before_the_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("SHIPWAY_NODE", "gpu-7")
    with pytest.raises(Fatal, match="7 of 8 GPUs on gpu-7"):
        find_devices(tmp_path)
    assert (tmp_path / "exclude").read_text() == "gpu-7\n"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    find_devices(tmp_path)
