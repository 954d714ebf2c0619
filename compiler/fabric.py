"""The cluster as a fabric of links, and what a process group gets of it.

Ranks are placed densely: rank r sits on device r. Mesh axes are laid out with tp innermost, then cp,
dp_shard, dp_replicate and pp outermost, so a group of an axis is `size` ranks, `stride` apart. The search
asks closed forms over arrays of groups; `fabric_graph` holds the same fabric as a networkx graph, and
tests hold the closed forms against flows on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.base import Number
from shipway.schemas.cluster import Cluster
from shipway.schemas.layout import Layout

if TYPE_CHECKING:
    import networkx as nx


@frozen
class Fabric:
    """Bandwidths are bytes per second of one device and one direction."""

    devices: int
    domain: int
    """Devices joined by scale-up links."""
    leaf: int
    """Devices below one leaf switch."""
    link_bandwidth: float
    network_bandwidth: float
    """A device's share of its node's network interfaces; 0 without a network."""
    network_latency: float
    oversubscription: float


@frozen
class Path:
    """How groups of `size` ranks, `stride` apart, lie on the fabric; arrays of one shape."""

    size: Number
    in_domain: Number
    """Ranks of the group in one scale-up domain."""
    domains: Number
    """Scale-up domains that the group spans."""
    in_leaf: Number
    """Ranks of the group below one leaf switch."""
    crosses_network: Number
    """Whether the group spans more than one scale-up domain."""


def fabric(cluster: Cluster) -> Fabric:
    """The fabric of a cluster; a cluster of one node has no network."""
    per_node = cluster.devices_per_node
    network = cluster.network
    share = network.nics_per_node * network.nic_bandwidth / per_node if network else 0.0
    leaf_nodes = network.nodes_per_leaf if network and network.nodes_per_leaf else cluster.nodes
    domain = min(cluster.link_domain or per_node, cluster.devices)
    return Fabric(
        devices=cluster.devices,
        domain=domain,
        leaf=max(leaf_nodes * per_node, domain),
        link_bandwidth=cluster.device.link_bandwidth,
        network_bandwidth=share,
        network_latency=network.latency if network else 0.0,
        oversubscription=network.oversubscription if network else 1.0,
    )


def path(fab: Fabric, size: Number, stride: Number) -> Path:
    """Where the ranks of a group lie.

    When the stride does not divide the domain, ranks fall unevenly; the fewest that a domain can hold is
    taken, which makes the network's share the largest (never too fast a figure).
    """
    size, stride = np.asarray(size), np.asarray(stride)
    span = size * stride
    fits = span <= fab.domain
    aligned = fits & (fab.domain % np.maximum(span, 1) == 0)
    in_domain = np.where(aligned, size, np.minimum(np.maximum(fab.domain // stride, 1), size))
    if fab.devices > fab.domain:
        # A group that only just fits may still straddle two domains when blocks do not tile the domain.
        straddles = fits & ~aligned & (size > 1)
        in_domain = np.where(straddles, np.maximum(in_domain // 2, 1), in_domain)
    in_leaf = np.minimum(np.maximum(fab.leaf // stride, 1), size)
    domains = -(-size // in_domain)
    return Path(size, in_domain, domains, in_leaf, domains > 1)


def ring_slowdown(fab: Fabric, where: Path) -> Number:
    """How much oversubscription slows a ring that visits leaves in order.

    One hop in `in_leaf / in_domain` network hops leaves its leaf, so uplinks carry that share of all
    interfaces' traffic and have 1 / oversubscription of their bandwidth.
    """
    hops = np.maximum(where.in_leaf / where.in_domain, 1)
    crosses = where.size > where.in_leaf
    return np.where(crosses, np.maximum(fab.oversubscription / hops, 1.0), 1.0)


def exchange_slowdown(fab: Fabric, where: Path) -> Number:
    """How much oversubscription slows an all-to-all: the share of network traffic that leaves the leaf."""
    outside = np.maximum(where.size - where.in_leaf, 0)
    network = np.maximum(where.size - where.in_domain, 1)
    return np.maximum(outside / network * fab.oversubscription, 1.0)


def axis_groups(
    pp: Number, dpr: Number, dps: Number, cp: Number, tp: Number, ep: Number
) -> dict[str, tuple[Number, Number]]:
    """(size, stride) of every group, from the placement order.

    `dp_shard` is the group that FSDP shards over, dp_shard x cp; `expert_shard` what is left of
    dp_shard x cp x tp once ep has taken its innermost part.
    """
    region = dps * cp * tp
    return {
        "tp": (tp, np.ones_like(tp)),
        "cp": (cp, tp),
        "dp_shard": (dps * cp, tp),
        "ep": (ep, np.ones_like(ep)),
        "expert_shard": (region // ep, ep),
        "dp_replicate": (dpr, region),
        "pp": (pp, region * dpr),
    }


def layout_groups(layout: Layout) -> dict[str, tuple[int, int]]:
    """(size, stride) of every group of one layout."""
    groups = axis_groups(
        *(
            np.int64(degree)
            for degree in (
                layout.pipeline_parallel,
                layout.data_parallel_replicate,
                layout.data_parallel_shard,
                layout.context_parallel,
                layout.tensor_parallel,
                layout.expert_parallel,
            )
        )
    )
    return {axis: (int(size), int(stride)) for axis, (size, stride) in groups.items()}


def fabric_graph(cluster: Cluster) -> nx.DiGraph[Any]:
    """The fabric as a graph: devices, a switch per scale-up domain, leaves and a spine.

    Edges carry `bandwidth` in bytes per second. Nodes are ("device", i), ("domain", i), ("leaf", i) and
    ("spine", 0).
    """
    import networkx as nx  # 0.3 s to import: only who asks for the graph pays

    fab = fabric(cluster)
    graph: nx.DiGraph[Any] = nx.DiGraph()

    def link(one: tuple[str, int], other: tuple[str, int], bandwidth: float) -> None:
        graph.add_edge(one, other, bandwidth=bandwidth)
        graph.add_edge(other, one, bandwidth=bandwidth)

    for device in range(fab.devices):
        link(("device", device), ("domain", device // fab.domain), fab.link_bandwidth)
        if fab.network_bandwidth:
            link(("device", device), ("leaf", device // fab.leaf), fab.network_bandwidth)
    leaves = -(-fab.devices // fab.leaf)
    if leaves > 1:
        for leaf in range(leaves):
            link(("leaf", leaf), ("spine", 0), fab.leaf * fab.network_bandwidth / fab.oversubscription)
    return graph
