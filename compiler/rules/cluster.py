"""Rules of the cluster section."""

from __future__ import annotations

from shipway.compiler.documents import KeyPath
from shipway.compiler.rules.report import Report
from shipway.compiler.rules.variables import refusal
from shipway.schemas.cluster import AihcTarget, Cluster, KubernetesTarget, LocalTarget, SshTarget

MOST_LEGAL = 4096
"""Largest legal value that is looked for."""


def check_cluster(cluster: Cluster, report: Report) -> None:
    """All rules of the cluster section."""
    nodes: dict[KeyPath, int] = {("cluster", "nodes"): cluster.nodes}
    if cluster.nodes > 1 and cluster.network is None:
        report.add(
            "BP400",
            ("cluster", "network") if report.written("cluster", "network") else ("cluster", "nodes"),
            f"{cluster.nodes} nodes need a network between them",
            help_text="Add cluster.network with nics_per_node and nic_bandwidth.",
        )
    _check_domain(cluster, report)
    if isinstance(cluster.target, LocalTarget) and cluster.nodes > 1:
        report.add(
            "BP405",
            ("cluster", "target", "kind")
            if report.written("cluster", "target", "kind")
            else ("cluster", "nodes"),
            f"the target `local` starts one machine, and the cluster has {cluster.nodes}",
            values=nodes,
            legal=("slurm", "kubernetes", "aihc", "ssh"),
            help_text="Choose the target that starts jobs on this cluster.",
        )
    if isinstance(cluster.target, SshTarget) and len(cluster.target.hosts) < cluster.nodes:
        report.add(
            "BP405",
            ("cluster", "target", "hosts"),
            f"{len(cluster.target.hosts)} hosts are named for {cluster.nodes} nodes",
            values=nodes,
            help_text="Name one host for each node; more are to spare.",
        )
    for name, value in cluster.target.environment.items():
        if reason := refusal(name, value):
            report.add(
                "BP407",
                ("cluster", "target", "environment", name),
                f"the variable {name} may not stand in a blueprint: it {reason}",
                help_text="Leave it out. Export secrets where you launch (local, Slurm), or name a Secret in "
                "cluster.target.secret (Kubernetes).",
            )
    image = getattr(cluster.target, "image", None)
    if isinstance(cluster.target, (KubernetesTarget, AihcTarget)) and isinstance(image, str):
        _check_image(image, report)


def _check_domain(cluster: Cluster, report: Report) -> None:
    domain = cluster.link_domain
    if domain is None:
        return
    node = cluster.devices_per_node
    devices: dict[KeyPath, int] = {("cluster", "devices_per_node"): node, ("cluster", "nodes"): cluster.nodes}
    fits_in_node = domain <= node and node % domain == 0
    fits_over_nodes = domain % node == 0 and domain <= cluster.devices
    if not (fits_in_node or fits_over_nodes):
        legal = [d for d in range(1, min(node, MOST_LEGAL) + 1) if node % d == 0]
        counts = range(2, min(cluster.nodes, MOST_LEGAL) + 1)
        legal += [node * count for count in counts if cluster.nodes % count == 0]
        report.add(
            "BP401",
            ("cluster", "link_domain"),
            f"a link domain of {domain} devices is no whole part or multiple of a node's {node}, "
            f"within the cluster's {cluster.devices}",
            values=devices,
            legal=tuple(sorted(legal, key=lambda d: (abs(d - domain), d))),
            help_text="Leave link_domain out where the links end at the node.",
        )


def _check_image(image: str, report: Report) -> None:
    name = image.rpartition("/")[2]
    if "@" not in image and (":" not in name or name.endswith(":latest")):
        report.add(
            "BP405",
            ("cluster", "target", "image"),
            f"the image `{image}` has no fixed version, so two starts of one run may differ",
            severity="warning",
            help_text="Give it a tag other than latest, or a digest.",
        )
