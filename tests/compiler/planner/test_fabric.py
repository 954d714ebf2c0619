"""The closed forms of the fabric against flows on its graph."""

from collections import Counter
from functools import cache
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.compiler.communication import Network
from shipway.compiler.efficiency import default_calibration
from shipway.compiler.fabric import (
    axis_groups,
    exchange_slowdown,
    fabric,
    fabric_graph,
    layout_groups,
    path,
    ring_slowdown,
)
from shipway.schemas.cluster import Cluster
from shipway.schemas.layout import Layout
from tests.compiler.planner.planning import blueprint, cluster, rebuilt


@cache
def base() -> Cluster:
    return rebuilt(blueprint("llama31_8b"), cluster(16)).cluster


def small_cluster(nodes: int, per_node: int, leaf: int | None, oversubscription: float) -> Cluster:
    network = base().network
    assert network is not None
    return base().model_copy(
        update={
            "nodes": nodes,
            "devices_per_node": per_node,
            "network": network.model_copy(
                update={
                    "nics_per_node": per_node,
                    "nodes_per_leaf": leaf,
                    "oversubscription": oversubscription,
                }
            )
            if nodes > 1
            else None,
        }
    )


def busiest_edge(graph: "nx.DiGraph", flows: list[tuple[int, int, float]]) -> float:
    """Seconds until the busiest edge has carried all flows, each on its shortest path."""
    load: Counter[tuple[object, object]] = Counter()
    routes = {one: nx.single_source_shortest_path(graph, ("device", one)) for one, _, _ in flows}
    for one, other, size in flows:
        for edge in pairwise(routes[one]["device", other]):
            load[edge] += size
    return max(size / graph.edges[edge]["bandwidth"] for edge, size in load.items())


def members(devices: int, size: int, stride: int) -> list[list[int]]:
    blocks = range(0, devices, size * stride)
    return [[base + offset + i * stride for i in range(size)] for base in blocks for offset in range(stride)]


shapes = st.tuples(
    st.sampled_from([1, 2, 4]),  # nodes
    st.sampled_from([2, 4, 8]),  # devices per node
    st.integers(0, 3),  # log2 of stride
    st.integers(1, 4),  # log2 of size
).filter(lambda s: (1 << (s[2] + s[3])) <= s[0] * s[1])


@settings(max_examples=25, deadline=None)
@given(shape=shapes, leaf=st.sampled_from([1, 2, 4]), ratio=st.sampled_from([1.0, 2.0, 3.0]))
def test_all_to_all_equals_the_flow_on_the_graph(
    shape: tuple[int, int, int, int], leaf: int, ratio: float
) -> None:
    nodes, per_node, stride, size = shape[0], shape[1], 1 << shape[2], 1 << shape[3]
    made = small_cluster(nodes, per_node, min(leaf, nodes), ratio)
    fab, graph = fabric(made), fabric_graph(made)
    block = 1e6
    flows = [
        (one, other, block)
        for group in members(fab.devices, size, stride)
        for one in group
        for other in group
        if one != other
    ]
    where = path(fab, np.array(size), np.array(stride))
    near = block * (where.in_domain - 1) / fab.link_bandwidth
    far = 0.0
    if where.crosses_network:
        far = block * (size - where.in_domain) / fab.network_bandwidth * exchange_slowdown(fab, where)
    assert max(near, far) == pytest.approx(busiest_edge(graph, flows))


@settings(max_examples=25, deadline=None)
@given(shape=shapes, leaf=st.sampled_from([1, 2, 4]), ratio=st.sampled_from([1.0, 2.0, 3.0]))
def test_a_ring_equals_the_flow_on_the_graph(
    shape: tuple[int, int, int, int], leaf: int, ratio: float
) -> None:
    """NCCL keeps one ring per rail: between domains every rank passes its share to its peer."""
    nodes, per_node, stride, size = shape[0], shape[1], 1 << shape[2], 1 << shape[3]
    made = small_cluster(nodes, per_node, min(leaf, nodes), ratio)
    fab, graph = fabric(made), fabric_graph(made)
    where = path(fab, np.array(size), np.array(stride))
    inside, domains = int(where.in_domain), int(where.domains)
    flows = []
    total = 1e6
    for group in members(fab.devices, size, stride):
        rows = [group[i * inside : (i + 1) * inside] for i in range(domains)]
        for i, row in enumerate(rows):
            following = rows[(i + 1) % domains]
            if domains > 1:
                # A rail carries the share of one rank of each domain, all domains' but one.
                share = total * (domains - 1) / domains / inside
                flows += [(one, other, share) for one, other in zip(row, following, strict=True)]
    if not flows:
        return
    slow = float(ring_slowdown(fab, where))
    closed = total * (domains - 1) / domains / inside / fab.network_bandwidth * slow
    measured = busiest_edge(graph, flows)
    assert closed == pytest.approx(measured) or closed > measured


@settings(max_examples=30, deadline=None)
@given(
    degrees=st.tuples(*[st.sampled_from([1, 2, 3, 4, 8]) for _ in range(5)]),
    ep=st.sampled_from([1, 2, 4, 8]),
)
def test_groups_partition_the_world(degrees: tuple[int, ...], ep: int) -> None:
    pp, replicate, shard, cp, tp = degrees
    region = shard * cp * tp
    if region % ep:
        return
    world = pp * replicate * region
    if world > 2048:
        return
    groups = axis_groups(*map(np.int64, (pp, replicate, shard, cp, tp, ep)))
    for size, stride in groups.values():
        flat = sorted(rank for group in members(world, int(size), int(stride)) for rank in group)
        assert flat == list(range(world))
    assert int(groups["ep"][0] * groups["expert_shard"][0]) == region


def test_placement_puts_tensor_parallel_innermost() -> None:
    layout = Layout(
        pipeline_parallel=2, data_parallel_shard=4, context_parallel=2, tensor_parallel=8, expert_parallel=16
    )
    assert layout_groups(layout) == {
        "tp": (8, 1),
        "cp": (2, 8),
        "dp_shard": (8, 8),
        "ep": (16, 1),
        "expert_shard": (4, 16),
        "dp_replicate": (1, 64),
        "pp": (2, 64),
    }


def test_an_nvl72_domain_spans_nodes() -> None:
    made = blueprint("k3", "cluster=gb200_18x4").cluster
    fab = fabric(made)
    assert fab.domain == 72
    where = path(fab, np.array([8, 64, 72]), np.array([1, 1, 1]))
    assert not where.crosses_network.any()


def test_groups_that_straddle_nodes_are_never_too_fast() -> None:
    fab = fabric(small_cluster(8, 8, None, 1.0))
    network = Network(fab, default_calibration(small_cluster(8, 8, None, 1.0).device).efficiency)
    aligned = network.collective_seconds("all_gather", 1e9, np.array(8), np.array(1))
    straddling = network.collective_seconds("all_gather", 1e9, np.array(5), np.array(1))
    assert straddling > 0
    assert network.collective_seconds("all_gather", 1e9, np.array(16), np.array(1)) > aligned


@settings(deadline=None)
@given(
    collective=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_receive"]),
    size=st.sampled_from([2, 4, 8, 16, 64]),
)
def test_more_bytes_take_longer_and_one_rank_nothing(collective: str, size: int) -> None:
    made = small_cluster(8, 8, 4, 2.0)
    network = Network(fabric(made), default_calibration(made.device).efficiency)
    sizes = np.array([1e3, 1e6, 1e9])
    seconds = network.collective_seconds(collective, sizes, np.full(3, size), np.ones(3, dtype=int))
    assert (np.diff(seconds) > 0).all()
    alone = network.collective_seconds(collective, sizes, np.ones(3, dtype=int), np.ones(3, dtype=int))
    assert (alone == 0).all()
