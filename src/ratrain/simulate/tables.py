"""A lowered program and its costs as the arrays that the engine reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratrain.program.action import Action, Kind
from ratrain.program.graph import Graph
from ratrain.program.program import STREAMS
from ratrain.simulate.cost import Cost, CostOf, Jitter, Network, Port

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

KINDS = tuple(Kind)


class Tables(NamedTuple):
    """Input of the engine, in the order of its arguments. N nodes, S steps, Q queues (one per lane and
    stream), K meetings.

    Arrays named `*_start` close a CSR: row i of x is x[x_start[i]:x_start[i + 1]].
    """

    streams: int  # queues per lane
    queue_start: Ints  # Q+1: first node of each queue; nodes of a queue are in list order
    queue: Ints  # N
    floating: NDArray[np.bool_]  # N: on a compute queue and free to be pulled forward
    pending: Ints  # S*N: how many nodes each waits for; those of the step before the first are done
    then_start: Ints
    then: Ints  # who waits for a node: a node of the same step, or N + a node of the next step
    seconds: Floats  # (S or 1, N)
    meeting: Ints  # N, -1 for local actions
    member_start: Ints
    member: Ints  # nodes of each meeting
    pattern: Ints  # K: row of `port` that a meeting loads
    port_start: Ints
    port: Ints
    load: Floats  # bytes, beside `port`
    connections: Floats  # per pattern
    capacity: Floats  # bytes/s of each port
    slowdown: float
    drag: float
    first_forward: Ints  # per lane, -1 if it has none


def tabulate(
    graph: Graph,
    cost: CostOf,
    network: Network,
    floating: frozenset[Kind],
    jitter: Jitter | None,
    steps: int,
) -> tuple[Tables, Ints]:
    """The engine's tables, and for each node the index of its kind in KINDS.

    Raises ValueError for a cost that is negative or not finite, or a load on a port without capacity.
    """
    count = len(graph.actions)
    price, first, kind_of_price = _prices(graph)
    costs = [_checked(graph.actions[node], cost, network) for node in first]
    kind = kind_of_price[price]
    waiting = np.repeat(np.arange(count, dtype=np.int32), np.diff(graph.indptr))
    waiting_next = np.repeat(np.arange(count, dtype=np.int32), np.diff(graph.before_indptr))
    known = graph.before >= 0
    then_start, then = _rows(
        np.concatenate([graph.indices, graph.before[known]]),
        np.concatenate([waiting, count + waiting_next[known]]),
        count,
    )
    pending = np.tile(np.diff(graph.indptr), (steps, 1))
    pending[1:] += np.bincount(waiting_next[known], minlength=count)
    meets = np.flatnonzero(graph.meeting >= 0).astype(np.int32)
    member_start, member = _rows(graph.meeting[meets], meets, graph.meetings)
    # All meetings that start with the same price have the same members but for their micro-batch.
    pattern = price[member[member_start[:-1]]]
    ports: dict[Port, int] = {}
    port_start, port, load, connections = _loads(costs, price, pattern, member_start, member, ports)
    on_compute = graph.stream == STREAMS.index("compute")
    is_forward = kind == KINDS.index(Kind.FORWARD)
    lanes = np.arange(len(graph.lanes))
    forwards = np.flatnonzero(is_forward)
    at = np.searchsorted(graph.lane[forwards], lanes)
    found = at < len(forwards)
    found[found] = graph.lane[forwards[at[found]]] == lanes[found]
    first_forward = np.full(len(lanes), -1, dtype=np.int32)
    first_forward[found] = forwards[at[found]]
    seconds = np.array([c.seconds for c in costs])[price][None, :]
    if jitter is not None:
        draw = np.random.default_rng(jitter.seed).standard_normal((steps, count))
        seconds = seconds * np.exp(jitter.sigma * draw)
    tables = Tables(
        streams=len(STREAMS),
        queue_start=graph.starts,
        queue=(graph.lane * len(STREAMS) + graph.stream).astype(np.int32),
        floating=on_compute & np.isin(kind, [KINDS.index(k) for k in floating]),
        pending=pending.reshape(-1).astype(np.int32),
        then_start=then_start,
        then=then,
        seconds=seconds,
        meeting=graph.meeting,
        member_start=member_start,
        member=member,
        pattern=pattern.astype(np.int32),
        port_start=port_start,
        port=port,
        load=load,
        connections=connections,
        capacity=np.array([network.capacity[p] for p in ports], dtype=np.float64),
        slowdown=float(network.slowdown),
        drag=float(network.drag),
        first_forward=first_forward,
    )
    return tables, kind


def _prices(graph: Graph) -> tuple[Ints, list[int], Ints]:
    """Per node the number of its price (kind, stage, unit, phase); per price its first node and kind."""
    numbers: dict[tuple[object, ...], int] = {}
    first: list[int] = []
    price = []
    for node, (kind, stage, unit, _, phase, _) in enumerate(graph.actions):
        number = numbers.setdefault((kind, stage, unit, phase), len(first))
        if number == len(first):
            first.append(node)
        price.append(number)
    code = {kind: i for i, kind in enumerate(KINDS)}
    kinds = np.array([code[graph.actions[node].kind] for node in first], dtype=np.int32)
    return np.array(price, dtype=np.int32), first, kinds


def _checked(action: Action, cost: CostOf, network: Network) -> Cost:
    if action.kind is Kind.RELEASE:
        return Cost(0.0)
    priced = cost(action)
    if not 0 <= priced.seconds < np.inf:
        raise ValueError(f"{action} costs {priced.seconds} seconds")
    for port, size in priced.loads:
        if not 0 <= size < np.inf or not network.capacity.get(port, 0) > 0:
            raise ValueError(f"{action} loads port {port} with {size} bytes: no such capacity")
    return priced


def _rows(row: Ints, value: Ints, count: int) -> tuple[Ints, Ints]:
    """CSR of (row, value) pairs, values in their given order within a row."""
    start = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(np.bincount(row, minlength=count), out=start[1:])
    return start, value[np.argsort(row, kind="stable")].astype(np.int32)


def _loads(
    costs: list[Cost],
    price: Ints,
    pattern: Ints,
    member_start: Ints,
    member: Ints,
    ports: dict[Port, int],
) -> tuple[Ints, Ints, Floats, Floats]:
    """CSR over patterns: the summed loads of all members, and the most connections of one. Numbers the ports on
    the way."""
    rows: list[dict[int, float]] = [{} for _ in costs]
    connections = np.ones(len(costs))
    used, example = np.unique(pattern, return_index=True)
    for row, k in zip(used.tolist(), example.tolist()):
        for node in member[member_start[k] : member_start[k + 1]].tolist():
            connections[row] = max(connections[row], costs[price[node]].connections)
            for port, size in costs[price[node]].loads:
                if size > 0:
                    number = ports.setdefault(port, len(ports))
                    rows[row][number] = rows[row].get(number, 0.0) + size
    start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=start[1:])
    port = np.array([number for row in rows for number in row], dtype=np.int32)
    load = np.array([size for row in rows for size in row.values()], dtype=np.float64)
    return start, port, load, connections
