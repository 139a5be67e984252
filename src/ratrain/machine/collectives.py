"""What a transfer costs: latency and bandwidth (α-β) of collectives and of point-to-point messages.

Closed forms, for n members and a buffer of S bytes (each of n shards is S/n):

    reduce-scatter, all-gather   n-1 steps (tree: ceil(log2 n)), (n-1)/n * S sent by each member
    all-reduce                   a reduce-scatter and an all-gather: twice the steps, twice the bytes
    p2p                          1 step, S bytes

Ring and tree (Bruck's, for any n) after Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005. Pairwise sends every shard straight to its owner: no partial sum
is forwarded, so the owner can add them in rank order. The algorithms send the same bytes; they differ in
steps, and in which bytes cross a node's uplink.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ratrain.machine.platform import Level, Link, Platform

Kind = Literal["reduce_scatter", "all_gather", "all_reduce", "p2p"]
Algorithm = Literal["ring", "tree", "pairwise"]
Direction = Literal["out", "in", "both"]


@dataclass(frozen=True)
class CollectiveCost:
    """`steps` messages follow each other, `alpha_s` seconds in all; each member sends `bytes_per_member`.

    `seconds_alone` is the duration when nothing else uses the links.
    """

    steps: int
    alpha_s: float
    bytes_per_member: float
    seconds_alone: float


@dataclass(frozen=True)
class Port:
    """Where bytes pass: the link of a device within its node, or of a node to the others, in one direction.

    On a half-duplex link the direction is "both".
    """

    level: Level
    owner: int
    direction: Direction


@dataclass(frozen=True)
class Transfer:
    """A collective placed on ranks: its latency, and the bytes it moves through each port.

    Whoever simulates several transfers at once divides each port's bandwidth among them.
    """

    steps: int
    alpha_s: float
    loads: Mapping[Port, float]


def collective(
    kind: Kind, algorithm: Algorithm, group_size: int, size_bytes: float, link: Link
) -> CollectiveCost:
    """Cost among `group_size` members that each have a `link` of their own; `size_bytes` is the whole buffer.

    Raises ValueError if the group is empty or p2p is asked of other than two members.
    """
    n = group_size
    steps = _steps(kind, algorithm, n)
    rounds = 2 if kind == "all_reduce" else 1
    sent = size_bytes if kind == "p2p" else rounds * (n - 1) / n * size_bytes
    # In a collective every member sends and receives at once, which a half-duplex link does one after the
    # other.
    turns = 2 if link.duplex == "half" and kind != "p2p" else 1
    alpha = steps * link.latency
    return CollectiveCost(steps, alpha, sent, alpha + turns * sent / link.total_bandwidth)


def place(
    kind: Kind, algorithm: Algorithm, ranks: Sequence[int], size_bytes: float, platform: Platform
) -> Transfer:
    """The same collective among actual ranks: bytes within a node on device ports, across nodes on node
    ports.

    Ranks take part in the order given (a ring that visits node after node crosses each uplink once). p2p goes
    from the first rank to the second.
    """
    steps = _steps(kind, algorithm, len(ranks))
    loads: defaultdict[Port, float] = defaultdict(float)
    crosses = False
    for source, target, fraction in _messages(kind, algorithm, len(ranks)):
        sender, receiver = ranks[source], ranks[target]
        ends = platform.node_of(sender), platform.node_of(receiver)
        level: Level = "within_node" if ends[0] == ends[1] else "between_nodes"
        if level == "within_node":
            ends = sender, receiver
        else:
            crosses = True
        half = platform.link(level).duplex == "half"
        for owner, direction in zip(ends, ("out", "in")):
            loads[Port(level, owner, "both" if half else direction)] += fraction * size_bytes  # type: ignore[arg-type]
    # Steps are synchronous: each lasts as long as its slowest message.
    latency = 0.0 if not loads else platform.link("between_nodes" if crosses else "within_node").latency
    return Transfer(steps, steps * latency, MappingProxyType(dict(loads)))


def seconds_together(transfers: Iterable[Transfer], platform: Platform) -> float:
    """Seconds until all of several transfers started at once have ended: the longest latency plus the
    fullest port.

    For a single transfer this is its duration alone.
    """
    loads: defaultdict[Port, float] = defaultdict(float)
    alpha = 0.0
    for transfer in transfers:
        alpha = max(alpha, transfer.alpha_s)
        for port, size in transfer.loads.items():
            loads[port] += size
    return alpha + max(
        (size / platform.link(p.level).total_bandwidth for p, size in loads.items()), default=0.0
    )


def _steps(kind: Kind, algorithm: Algorithm, n: int) -> int:
    if n < 1:
        raise ValueError(f"a group has at least 1 member, not {n}")
    if kind == "p2p":
        if n != 2:
            raise ValueError(f"p2p is between 2 ranks, not {n}")
        return 1
    once = math.ceil(math.log2(n)) if algorithm == "tree" else n - 1
    return once * (2 if kind == "all_reduce" else 1)


def _messages(kind: Kind, algorithm: Algorithm, n: int) -> Iterator[tuple[int, int, float]]:
    """(sender, receiver, fraction of the buffer) by position in the group, messages of all steps added up."""
    if kind == "p2p":
        yield 0, 1, 1.0
        return
    rounds = 2 if kind == "all_reduce" else 1
    for i in range(n if n > 1 else 0):
        if algorithm == "ring":
            yield i, (i + 1) % n, rounds * (n - 1) / n
        elif algorithm == "pairwise":
            for distance in range(1, n):
                yield i, (i + distance) % n, rounds / n
        else:
            for power in range(math.ceil(math.log2(n))):
                # Bruck: at distance 2^k a member passes on the 2^k shards it has, the last time what is
                # missing.
                distance = 2**power
                yield i, (i + distance) % n, rounds * min(distance, n - distance) / n
