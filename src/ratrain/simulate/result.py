"""What a simulation found, in the terms in which a measured run is reported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratrain.program.action import Action, Kind
from ratrain.program.graph import Graph
from ratrain.program.memory import Footprint, handed_over
from ratrain.program.program import STREAMS, Program
from ratrain.program.timeline import Row, StepAccount, Timeline, account
from ratrain.simulate.tables import KINDS, Floats, Ints

COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.RECOVER, Kind.UPDATE_SHARD)
"""What makes a device compute; otherwise its compute stream waits or communicates."""


class Live(NamedTuple):
    """Bytes of one rank: `bytes[i]` from `times[i]` seconds on, `Footprint.constant` included."""

    times: Floats
    bytes: NDArray[np.int64]


@dataclass(frozen=True)
class Simulation:
    """Times of every action. Lanes are those of `graph`; identical replicas are one lane.

    start, end    (steps, nodes) seconds; start is when its stream came to it, as the executor records it.
                  -1: not reached (only in the last of several steps)
    turn          (steps, nodes) order in which actions started
    stood         (steps, nodes) step * N + node for which `compute` stood still before it, -1 if it did not
    kind          (nodes) index into tables.KINDS
    first_forward (lanes) node, -1 if the program has no FORWARD
    """

    program: Program
    graph: Graph
    kind: Ints
    start: Floats
    end: Floats
    turn: NDArray[np.int64]
    stood: NDArray[np.int64]
    first_forward: Ints
    footprints: tuple[Footprint, ...] | None = None

    @property
    def measured(self) -> int:
        """Index of the reported step."""
        return max(len(self.start) - 2, 0)

    @cached_property
    def window(self) -> tuple[Floats, Floats]:
        """Per lane where the reported step begins and ends, in seconds.

        From its first FORWARD to the next step's; a program that ran once, from 0 to its last end.
        """
        lanes = len(self.graph.lanes)
        if len(self.start) == 1:
            return np.zeros(lanes), np.full(lanes, self.end.max(initial=0.0))
        k, at = self.measured, self.first_forward
        return self.start[k, at], self.start[k + 1, at]

    @cached_property
    def step(self) -> float:
        """Seconds of the step on the slowest rank."""
        begin, end = self.window
        return float((end - begin).max())

    @cached_property
    def busy(self) -> tuple[dict[Kind, float], ...]:
        """Per lane, seconds of the step by kind of action on the compute stream."""
        begin, end = self.window
        lanes = len(self.graph.lanes)
        table = np.zeros((lanes, len(KINDS)))
        compute = self.graph.stream == STREAMS.index("compute")
        for k in range(self.measured, min(self.measured + 2, len(self.start))):
            start, stop, lane = self.start[k], self.end[k], self.graph.lane
            inside = compute & (stop > start) & (start >= begin[lane]) & (start < end[lane])
            np.add.at(table, (lane[inside], self.kind[inside]), (stop - start)[inside])
        return tuple({KINDS[i]: float(row[i]) for i in np.flatnonzero(row)} for row in table)

    @cached_property
    def bubble(self) -> float:
        """Mean share of the step in which a device does not compute (COMPUTES): it waits or communicates."""
        begin, end = self.window
        shares = [
            1 - sum(busy.get(kind, 0.0) for kind in COMPUTES) / (stop - start)
            for busy, start, stop in zip(self.busy, begin, end)
            if stop > start
        ]
        return float(np.mean(shares)) if shares else 0.0

    @cached_property
    def accounts(self) -> tuple[StepAccount, ...]:
        """Per lane, the step as `program.timeline.account` books it; empty without a FORWARD."""
        found = []
        for lane in range(len(self.graph.lanes)):
            rows = self._compute_rows(lane)
            first = [i for i, r in enumerate(rows) if r.action == self._first(lane)]
            if not first:
                continue
            following = rows[first[1]] if len(first) > 1 else None
            booked = account(rows[first[0] : first[1] if following else len(rows)], following)
            assert booked is not None
            found.append(booked)
        return tuple(found)

    @property
    def exposed_mean(self) -> float:
        """Mean over ranks of the step's seconds that are neither FORWARD nor BACKWARD."""
        return float(np.mean([a.exposed for a in self.accounts])) if self.accounts else 0.0

    @property
    def exposed_max(self) -> float:
        """The same of the rank where it is longest."""
        return max((a.exposed for a in self.accounts), default=0.0)

    @property
    def tail(self) -> float:
        """Longest tail of a rank, in seconds."""
        return max((a.tail for a in self.accounts), default=0.0)

    @property
    def causes(self) -> dict[str, float]:
        """Exposed seconds by cause, mean over ranks."""
        total: dict[str, float] = {}
        for booked in self.accounts:
            for cause, seconds in booked.causes.items():
                total[cause] = total.get(cause, 0.0) + seconds / len(self.accounts)
        return total

    @cached_property
    def timeline(self) -> Timeline:
        """The reported step, and of the next one what starts up to its ranks' first forwards.

        Time 0 is the earliest start of the reported step.
        """
        k = self.measured
        zero = float(self.start[k].min(initial=np.inf))
        last = float(self.window[1].max(initial=0.0))
        rows = [self._row(k, node, zero) for node in np.argsort(self.turn[k], kind="stable").tolist()]
        if k + 1 < len(self.start):
            begun = np.flatnonzero((self.end[k + 1] >= 0) & (self.start[k + 1] <= last))
            order = begun[np.argsort(self.turn[k + 1, begun], kind="stable")]
            rows += [self._row(k + 1, node, zero) for node in order.tolist()]
        return Timeline(rows, {self._rank(lane): 0.0 for lane in range(len(self.graph.lanes))}, "simulated")

    @cached_property
    def live(self) -> tuple[Live, ...]:
        """Per lane, saved activations and working sets over the reported step, as they really lived."""
        if self.footprints is None:
            raise ValueError("live bytes need footprints: pass them to simulate()")
        return tuple(
            self._live(lane, self.footprints[stage]) for lane, (stage, _) in enumerate(self.graph.lanes)
        )

    @property
    def peak(self) -> tuple[int, ...]:
        """Per lane, the most live bytes."""
        return tuple(int(live.bytes.max()) for live in self.live)

    def _live(self, lane: int, footprint: Footprint) -> Live:
        level, times, most = footprint.constant, [0.0], [footprint.constant]
        trains = self.program.form in ("first", "steady")
        waiting = handed_over(self.program, self.graph.lanes[lane][0])
        for node in self._compute_nodes(lane, self.measured):
            action = self.graph.actions[node]
            level += waiting.get(action, 0) * footprint.boundary
            block, j = action.unit or "", action.microbatch
            works = footprint.working.get(block, 0)
            if action.kind is Kind.FORWARD:
                assert j is not None
                if trains:
                    level += footprint.kept[block, self.program.keeps(action.stage, block, j)]
            elif action.kind is Kind.RECOVER:
                assert j is not None
                rung = self.program.keeps(action.stage, block, j)
                level += footprint.kept[block, "keep"] - footprint.kept[block, rung]
            elif action.kind is Kind.RELEASE and action.phase == "act":
                level -= footprint.kept[block, "keep"]
                works = 0
            elif action.kind is not Kind.BACKWARD:
                continue
            times.append(float(self.start[self.measured, node]))
            most.append(level + works)
        return Live(np.array(times), np.array(most, dtype=np.int64))

    def _compute_nodes(self, lane: int, step: int) -> list[int]:
        """Nodes of a compute stream in the order in which they started."""
        queue = lane * len(STREAMS) + STREAMS.index("compute")
        nodes = np.arange(self.graph.starts[queue], self.graph.starts[queue + 1])
        nodes = nodes[self.end[step, nodes] >= 0]
        return nodes[np.argsort(self.turn[step, nodes], kind="stable")].tolist()

    def _compute_rows(self, lane: int) -> list[Row]:
        steps = range(self.measured, min(self.measured + 2, len(self.start)))
        rows = []
        for k in steps:
            nodes = self._compute_nodes(lane, k)
            if k > self.measured:
                first = int(self.first_forward[lane])
                begun = self.turn[k, first]
                nodes = [n for n in nodes if self.turn[k, n] < begun] + [first]
            rows += [self._row(k, node, 0.0) for node in nodes]
        return rows

    def _row(self, step: int, node: int, zero: float) -> Row:
        lane, stood = int(self.graph.lane[node]), int(self.stood[step, node])
        return Row(
            self._rank(lane),
            step,
            STREAMS[self.graph.stream[node]],
            self.graph.actions[node],
            float(self.start[step, node]) - zero,
            float(self.end[step, node]) - zero,
            self._awaited(stood) if stood >= 0 else None,
        )

    def _awaited(self, flat: int) -> Action | None:
        """What `flat`, a step and a node, waited for last."""
        graph, (step, node) = self.graph, divmod(flat, len(self.graph.actions))
        ends = [
            (float("inf") if self.end[step, need] < 0 else float(self.end[step, need]), need)
            for need in graph.indices[graph.indptr[node] : graph.indptr[node + 1]].tolist()
        ]
        if step > 0:
            before = graph.before[graph.before_indptr[node] : graph.before_indptr[node + 1]].tolist()
            ends += [(float(self.end[step - 1, need]), need) for need in before if need >= 0]
        return graph.actions[max(ends)[1]] if ends else None

    def _rank(self, lane: int) -> int:
        stage, replica = self.graph.lanes[lane]
        return stage * self.program.layout.replicas + replica

    def _first(self, lane: int) -> Action | None:
        node = int(self.first_forward[lane])
        return self.graph.actions[node] if node >= 0 else None
