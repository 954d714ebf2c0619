"""Time of collectives on the fabric, vectorised over layouts.

Ring costs: Thakur, Rabenseifner and Gropp 2005; hierarchical terms: the slower of the scale-up and the
network share, which NCCL's rings and its pairwise all-to-all move at the same time.
"""

from __future__ import annotations

import numpy as np

from shipway.compiler.fabric import Fabric, Path, exchange_slowdown, path, ring_slowdown
from shipway.compiler.frozen import frozen
from shipway.compiler.operators.base import Number
from shipway.schemas.calibration import Curve, Efficiency


@frozen
class Network:
    """A fabric and how much of it collectives reach."""

    fabric: Fabric
    efficiency: Efficiency

    def collective_seconds(self, collective: str, size_bytes: Number, size: Number, stride: Number) -> Number:
        """Seconds of one call over groups of `size` ranks, `stride` apart; 0 for groups of one rank.

        `size_bytes` is the full tensor: what all-gather ends with and reduce-scatter and all-reduce start
        with; for all-to-all what one rank holds; for send_receive what is sent.
        """
        if np.all(np.equal(size, 1)):
            return np.zeros(np.broadcast_shapes(np.shape(size_bytes), np.shape(size)))
        return self.seconds_on(path(self.fabric, size, stride), collective, size_bytes)

    def seconds_on(self, where: Path, collective: str, size_bytes: Number) -> Number:
        """As `collective_seconds`, for groups whose place on the fabric is known."""
        match collective:
            case "all_gather" | "reduce_scatter" | "broadcast":
                seconds = self._ring(size_bytes, where, passes=1)
            case "all_reduce":
                seconds = np.minimum(self._ring(size_bytes, where, passes=2), self._tree(size_bytes, where))
            case "all_to_all":
                seconds = self._exchange(size_bytes, where)
            case "send_receive":
                seconds = self._send(size_bytes, where)
            case _:
                raise ValueError(f"unknown collective {collective!r}")
        return np.where(where.size > 1, seconds + self.efficiency.call_seconds, 0.0)

    def _bandwidth_seconds(self, sent_bytes: Number, bandwidth: float, curve: Curve) -> Number:
        if bandwidth <= 0:
            return np.where(np.asarray(sent_bytes) > 0, np.inf, 0.0)
        reached = curve.ceiling * bandwidth
        # sent / (reached * x / (x + half)) = (sent + half) / reached: the curve is a fixed cost.
        return np.where(np.asarray(sent_bytes) > 0, (sent_bytes + curve.half) / reached, 0.0)

    def _step_latency(self, where: Path) -> tuple[Number, Number]:
        near = self.efficiency.scale_up_latency
        far = self.fabric.network_latency + self.efficiency.network_latency
        return near, far

    def _ring(self, size_bytes: Number, where: Path, passes: int) -> Number:
        near, far = self._step_latency(where)
        scale_up = passes * size_bytes * (where.size - 1) / np.maximum(where.size, 1)
        # All ranks of the group in a domain feed its share through their own interfaces.
        rails = passes * size_bytes * (where.domains - 1) / np.maximum(where.domains, 1) / where.in_domain
        seconds = np.maximum(
            self._bandwidth_seconds(
                np.where(where.in_domain > 1, scale_up, 0.0),
                self.fabric.link_bandwidth,
                self.efficiency.scale_up,
            ),
            self._bandwidth_seconds(rails, self.fabric.network_bandwidth, self.efficiency.network)
            * ring_slowdown(self.fabric, where),
        )
        # Rings deeper than a few hundred ranks are pipelined trees or PAT in NCCL: latency grows by log.
        far_steps = np.minimum(where.domains - 1, 8 * np.log2(np.maximum(where.domains, 2)))
        near_steps = np.minimum(where.in_domain - 1, 16)
        return seconds + passes * (near_steps * near + np.where(where.domains > 1, far_steps * far, 0.0))

    def _tree(self, size_bytes: Number, where: Path) -> Number:
        near, far = self._step_latency(where)
        rails = 2 * size_bytes / where.in_domain
        scale_up = 2 * size_bytes * (where.in_domain - 1) / np.maximum(where.in_domain, 1)
        seconds = np.maximum(
            self._bandwidth_seconds(
                np.where(where.in_domain > 1, scale_up, 0.0),
                self.fabric.link_bandwidth,
                self.efficiency.scale_up,
            ),
            self._bandwidth_seconds(
                np.where(where.domains > 1, rails, 0.0),
                self.fabric.network_bandwidth,
                self.efficiency.network,
            )
            * ring_slowdown(self.fabric, where),
        )
        depth = 2 * np.log2(np.maximum(where.domains, 1)) * far
        return seconds + depth + 2 * (where.in_domain - 1) * near

    def _exchange(self, size_bytes: Number, where: Path) -> Number:
        near, far = self._step_latency(where)
        per_peer = size_bytes / np.maximum(where.size, 1)
        scale_up = self._bandwidth_seconds(
            per_peer * (where.in_domain - 1), self.fabric.link_bandwidth, self.efficiency.scale_up
        )
        rails = self._bandwidth_seconds(
            per_peer * (where.size - where.in_domain),
            self.fabric.network_bandwidth,
            self.efficiency.network,
        )
        # Messages to peers are issued together; what each adds is its injection, not a round trip.
        injection = (where.size - 1) * 0.3e-6
        latency = np.where(where.domains > 1, far, near)
        return np.maximum(scale_up, rails * exchange_slowdown(self.fabric, where)) + injection + latency

    def _send(self, size_bytes: Number, where: Path) -> Number:
        near, far = self._step_latency(where)
        # Neighbours in a group are `stride` apart: on the network as soon as a domain holds one of them.
        inside = where.in_domain == where.size
        return np.where(
            inside,
            self._bandwidth_seconds(size_bytes, self.fabric.link_bandwidth, self.efficiency.scale_up) + near,
            self._bandwidth_seconds(size_bytes, self.fabric.network_bandwidth, self.efficiency.network)
            * np.where(where.in_leaf < where.size, self.fabric.oversubscription, 1.0)
            + far,
        )


def algorithm(collective: str) -> str:
    """Name of the algorithm that the time assumes."""
    return {
        "all_gather": "ring",
        "reduce_scatter": "ring",
        "broadcast": "ring",
        "all_reduce": "ring or tree",
        "all_to_all": "pairwise",
        "send_receive": "point to point",
    }[collective]
