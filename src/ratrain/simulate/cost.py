"""What the simulator is told from outside: how long actions take, what they send, and what links carry."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ratrain.program.action import Action

Port = Hashable
"""Where bytes pass, in one direction: a device's or a node's link. A full-duplex link is two ports."""


class Cost(NamedTuple):
    """What one action costs the rank that lists it.

    seconds  local action: its duration. Communication: what passes before bytes flow (steps times latency)
    loads    communication: (port, bytes) that this member moves through its ports
    connections  communication: how many carry it side by side through each port

    A transfer or collective lasts the longest `seconds` of its members, then as long as all their loads
    together take. So a SEND states what leaves its rank and the RECV what enters its own. Replicas that do
    the same are simulated once: where several share a port, its load is the sum over them.
    """

    seconds: float
    loads: tuple[tuple[Port, float], ...] = ()
    connections: int = 1


CostOf = Callable[[Action], Cost]
"""Asked once per kind, stage, unit and phase, with the first such action: what an action costs does not depend
on its micro-batch. Never asked about RELEASE, which is free."""


@dataclass(frozen=True)
class Network:
    """capacity  bytes/s of every port named in a load
    slowdown  multiplies a rank's local compute time while one of its transfers is under way (1: none)
    drag      multiplies a transfer's time, latency included, while one of its members computes (1: none)

    A port divides equally among the connections on it, as TCP does; a transfer runs at the pace of its slowest
    port, and what it leaves unused of another goes to nobody.
    """

    capacity: Mapping[Port, float]
    slowdown: float = 1.0
    drag: float = 1.0


@dataclass(frozen=True)
class Jitter:
    """Each action of each rank takes exp(N(0, sigma)) times its seconds, drawn from `seed`."""

    seed: int
    sigma: float
