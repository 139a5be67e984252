"""What messages and collectives between the ranks of a layout ask of the links.

Ranks of one stage are neighbours and fill nodes in order (rank = (stage * D + replica) * T + t), so tensor
groups, then replicas, stay within nodes where they can. All replicas do the same at the same time, so a rank
has its share of its node's uplink. Collectives are rings: one visits node after node and crosses each uplink
once in each direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from ratrain.machine.collectives import Kind, collective
from ratrain.machine.platform import LOCAL, Link, Platform, load_platform
from ratrain.machine.profile import Profile


@cache
def _loopback() -> Link:
    """For what a profile did not measure."""
    return load_platform(LOCAL).between_nodes


@dataclass(frozen=True)
class Flow:
    """A transfer as one rank sees it: latency, and the seconds for which it would fill its own link and its
    share of the node's uplink, each way; `turns` is 2 where both ways take turns; `connections` carry it."""

    latency: float = 0.0
    within: float = 0.0
    between: float = 0.0
    turns: int = 1
    connections: int = 1

    @property
    def seconds(self) -> float:
        """Duration if nothing else uses the links."""
        return self.latency + self.turns * max(self.within, self.between)


@dataclass(frozen=True)
class Network:
    """The links of a platform or a profile under a layout of D replicas and T tensor ranks."""

    source: Platform | Profile
    data: int
    tensor: int = 1

    def message(self, size: int) -> Flow:
        """One message from a stage to the next."""
        if isinstance(self.source, Profile):
            return self._measured(self.source, "p2p", 2, size)
        return self._flow("p2p", 2, 1, size, span=2 * self.data * self.tensor)

    def over_replicas(self, kind: Kind, size: int) -> Flow:
        """A collective of one stage's replicas on a buffer of `size` bytes."""
        if self.data == 1:
            return Flow()
        if isinstance(self.source, Profile):
            return self._measured(self.source, kind, self.data, size)
        return self._flow(kind, self.data, self.tensor, size, span=self.data * self.tensor)

    def over_tensor(self, size: int) -> Flow:
        """An all-reduce of the ranks that share one stage's operators."""
        if self.tensor == 1:
            return Flow()
        if isinstance(self.source, Profile):
            return self._measured(self.source, "all_reduce", self.tensor, size)
        return self._flow("all_reduce", self.tensor, 1, size, span=self.tensor)

    def rendezvous(self, ranks: int) -> Flow:
        """A small all-reduce of all ranks: latency only."""
        if isinstance(self.source, Profile):
            return Flow(self._measured(self.source, "all_gather", ranks, 0).latency if ranks > 1 else 0.0)
        link = self.source.between_nodes
        return Flow(2 * math.ceil(math.log2(ranks)) * link.latency if ranks > 1 else 0.0)

    def half_duplex(self, level: str) -> bool:
        """Whether sending and receiving share the link of a level."""
        return isinstance(self.source, Platform) and self.source.link(level).duplex == "half"  # type: ignore[arg-type]

    def _flow(self, kind: Kind, members: int, stride: int, size: int, span: int) -> Flow:
        """`span` ranks, contiguous, hold the members; every `stride`-th of them is one, and the others' rings
        run beside this one."""
        assert isinstance(self.source, Platform)
        per_node, within = self.source.devices_per_node, self.source.within_node
        if span <= per_node and within is not None:
            cost = collective(kind, "ring", members, size, within)
            return Flow(
                cost.alpha_s, cost.bytes_per_member / within.total_bandwidth, 0.0, _turns(kind, within)
            )
        between = self.source.between_nodes
        cost = collective(kind, "ring", members, size, between)
        sent = cost.bytes_per_member
        # In a ring each of a node's uplinks carries one member's bytes, shared here among all of the node's.
        in_node = 1 if kind == "p2p" else max(1, min(members, per_node // stride))
        share = between.total_bandwidth / per_node
        inside = 0.0 if within is None or in_node == 1 else sent / within.total_bandwidth
        return Flow(cost.alpha_s, inside, sent / in_node / share, _turns(kind, between))

    def _measured(self, profile: Profile, kind: Kind, members: int, size: int) -> Flow:
        """From the measured group of nearest size; a ring's latency grows with its members."""
        sizes = {c.group_size for c in profile.communications if c.kind == kind}
        if not sizes:
            return Flow(_loopback().latency, size / _loopback().bandwidth)
        nearest = min(sizes, key=lambda n: (abs(n - members), n))
        measured = profile.communication(kind, nearest)
        steps = (members - 1) / (nearest - 1)
        sent = collective(kind, "ring", members, size, _loopback()).bytes_per_member
        # The runtime's collectives are pairwise: each member sends to all others at once.
        others = 1 if kind == "p2p" else members - 1
        return Flow(
            measured.alpha * steps, max(0.0, measured.seconds(sent) - measured.alpha), connections=others
        )


def _turns(kind: Kind, link: Link) -> int:
    """Members of a collective send and receive at once."""
    return 2 if link.duplex == "half" and kind != "p2p" else 1
