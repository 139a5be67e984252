"""Realistic report inputs: timelines of real programs under a toy event loop, and whole run folders."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ratrain.program.action import Action, Kind
from ratrain.program.graph import lower
from ratrain.program.layout import Layout
from ratrain.program.passes import PASSES, build
from ratrain.program.program import STREAMS, Program
from ratrain.program.timeline import Row, Timeline
from ratrain.report.forecast import Forecast, write_forecast
from ratrain.report.places import Place
from ratrain.report.steps import steps_of, typical
from ratrain.report.trace import write_trace

MILLISECONDS: dict[Kind, float] = {
    Kind.FORWARD: 10, Kind.BACKWARD: 20, Kind.RECOVER: 9, Kind.SEND_ACT: 4, Kind.RECV_ACT: 4,
    Kind.SEND_GRAD: 4, Kind.RECV_GRAD: 4, Kind.GRAD_SYNC: 14, Kind.TIED_SYNC: 9, Kind.GRAD_NORM: 1.5,
    Kind.UPDATE_SHARD: 4, Kind.PREFETCH_VIEW: 8, Kind.RELEASE: 0,
}  # fmt: skip
BUDGET = 2_000_000_000


def mesh(layout: Layout) -> tuple[Place, ...]:
    """Ranks stage by stage."""
    d = layout.replicas
    return tuple(Place(s * d + r, s, r) for s in range(layout.pipeline) for r in range(d))


def run_program(
    layout: Layout,
    passes: tuple[str, ...] = tuple(PASSES),
    steps: int = 4,
    noise: float = 0.0,
    seed: int = 0,
    slower: Mapping[Kind, float] | None = None,
    replicas: int | None = None,
) -> Timeline:
    """Repeats the steady program with toy durations. Floats are pulled forward; `noise` is relative."""
    layout = layout.with_(replicas=layout.replicas)
    program = build(layout, "steady", passes)
    program = replace(program, lanes=tuple(tuple(dict(lane) for lane in r) for r in program.lanes))
    toy = _Toy(program, steps, noise, random.Random(seed), slower or {})
    rows = toy.run()
    if replicas is not None:
        rows = [r for r in rows if r.rank % layout.replicas < replicas]
    source = "measured" if noise else "simulated"
    return Timeline(rows, {rank: 0.0 for rank in sorted({r.rank for r in rows})}, source)


class _Toy:
    def __init__(
        self, program: Program, steps: int, noise: float, rng: random.Random, slower: Mapping[Kind, float]
    ) -> None:
        self.graph, self.program, self.rng, self.noise, self.slower = (
            lower(program),
            program,
            rng,
            noise,
            slower,
        )
        graph, n = self.graph, len(self.graph.actions)
        self.n = n
        self.wants: list[int] = [0] * (n * steps)
        self.next: list[list[int]] = [[] for _ in range(n * steps)]
        for step in range(steps):
            for node in range(n):
                own = graph.indices[graph.indptr[node] : graph.indptr[node + 1]]
                old = graph.before[graph.before_indptr[node] : graph.before_indptr[node + 1]]
                deps = [step * n + int(i) for i in own]
                deps += [(step - 1) * n + int(i) for i in old if i >= 0 and step > 0]
                self.wants[step * n + node] = len(deps)
                for dep in deps:
                    self.next[dep].append(step * n + node)
        lanes = len(graph.lanes) * len(STREAMS)
        self.queues = [
            [s * n + i for s in range(steps) for i in range(graph.starts[q], graph.starts[q + 1])]
            for q in range(lanes)
        ]
        self.free = [True] * lanes
        self.idle_since = [0.0] * lanes
        self.blamed: list[Action | None] = [None] * (n * steps)
        parties: dict[int, int] = {}
        for m in graph.meeting:
            parties[int(m)] = parties.get(int(m), 0) + 1
        self.parties = parties
        self.waiting: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
        self.events: list[tuple[float, int, int, int]] = []
        self.rows: list[Row] = []

    def run(self) -> list[Row]:
        for q in range(len(self.queues)):
            self._start(q, 0.0)
        while self.events:
            now, _, node, q = heapq.heappop(self.events)
            touched = {q}
            self.free[q], self.idle_since[q] = True, now
            for after in self.next[node]:
                self.wants[after] -= 1
                if self.wants[after] == 0:
                    self.blamed[after] = self.graph.actions[node % self.n]
                lane = int(self.graph.lane[after % self.n]) * len(STREAMS)
                touched.add(lane + int(self.graph.stream[after % self.n]))
            for other in touched:
                self._start(other, now)
        assert not any(self.queues), "the toy deadlocked"
        return sorted(self.rows, key=lambda r: (r.rank, r.start))

    def _start(self, q: int, now: float) -> None:
        queue = self.queues[q]
        if not self.free[q] or not queue:
            return
        pick = 0
        if self.wants[queue[0]]:
            floats = self.program.floating if q % len(STREAMS) == 0 else frozenset()
            for i, node in enumerate(queue[:300]):
                if self.graph.actions[node % self.n].kind in floats and not self.wants[node]:
                    pick = i
                    break
            else:
                return
        node = queue.pop(pick)
        self.free[q] = False
        action, meeting = self.graph.actions[node % self.n], int(self.graph.meeting[node % self.n])
        if meeting < 0:
            self._finish(node, q, now, now + self._seconds(action))
            return
        key = (node // self.n, meeting)
        here = self.waiting.setdefault(key, [])
        here.append((node, q, now))
        if len(here) == self.parties[meeting]:
            end = now + self._seconds(action)
            for other, lane, began in here:
                self._finish(other, lane, began, end)

    def _seconds(self, action: Action) -> float:
        base = MILLISECONDS[action.kind] * 1e-3 * self.slower.get(action.kind, 1.0)
        if action.unit == "head":
            base *= 1.7
        elif action.unit == "embed":
            base *= 0.3
        return base * math.exp(self.rng.gauss(0.0, self.noise)) if self.noise else base

    def _finish(self, node: int, q: int, began: float, end: float) -> None:
        action = self.graph.actions[node % self.n]
        stage, replica = self.graph.lanes[q // len(STREAMS)]
        rank = stage * self.program.layout.replicas + replica
        waited = self.blamed[node] if began > self.idle_since[q] else None
        self.rows.append(Row(rank, node // self.n, STREAMS[q % len(STREAMS)], action, began, end, waited))
        heapq.heappush(self.events, (end, len(self.rows), node, q))


def write_run(
    folder: Path, layout: Layout, updates: int = 200, forecast: bool = True, noise: float = 0.05
) -> None:
    """A run folder as a real run leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    places = mesh(layout)
    timeline = run_program(layout, noise=noise, seed=3, slower={Kind.GRAD_SYNC: 1.35, Kind.RECOVER: 1.1})
    for rank in timeline.offsets:
        timeline.offsets[rank] = rng.uniform(-5, 5)
    timeline.rows = [
        r._replace(start=r.start - timeline.offsets[r.rank], end=r.end - timeline.offsets[r.rank])
        for r in timeline.rows
    ]
    write_trace(timeline, folder / "trace.json", places)
    peaks = [int(1.2e9 + 6e8 / (p.stage + 1) + rng.uniform(0, 4e7)) for p in places]
    if forecast:
        told = run_program(layout, replicas=1)
        kept = tuple(p for p in places if p.replica == 0)
        expected = tuple(int(peaks[p.rank] * rng.uniform(0.96, 1.03)) for p in kept)
        write_forecast(Forecast(told, kept, expected, BUDGET), folder / "forecast.json")
    step = typical(steps_of(timeline))
    assert step is not None
    (folder / "plan.json").write_text(
        json.dumps(
            {
                "layers": layout.layer_counts,
                "data": layout.replicas,
                "zero": layout.zero,
                "micro_batch": 2,
                "global_batch": 2 * layout.microbatches * layout.replicas,
                "rungs": layout.rungs,
                "passes": list(PASSES),
            }
        )
    )
    (folder / "run.toml").write_text('[model]\nconfig = "examples/tiny"\n\n[train]\nsteps = 200\n')
    lines: list[dict[str, object]] = [
        {
            "run": {
                "world_size": len(places),
                "budget_bytes": BUDGET,
                "unigram_entropy": 6.42,
                "ranks": [p.to_json() for p in places],
            }
        }
    ]
    for n in range(1, updates + 1):
        loss = 3.6 + 4.7 * math.exp(-n / 45) + rng.gauss(0, 0.06)
        seconds = step.time * math.exp(rng.gauss(0, 0.03))
        lines.append(
            {
                "step": n,
                "loss": loss,
                "grad_norm": 0.6 + 3 * math.exp(-n / 30) + rng.uniform(0, 0.2),
                "lr": 3e-4 * min(1, n / 20) * (0.55 + 0.45 * math.cos(math.pi * n / updates)),
                "target_tokens": 16384,
                "step_time_s": seconds,
                "tokens_per_s": 16384 / seconds,
                "exposed_s": {"mean": step.exposed[0], "max": step.exposed[1]},
                "exposed_by_cause": step.causes,
                "tail_s": {"mean": step.tail[0], "max": step.tail[1]},
                "peak_bytes": peaks,
                "skipped": False,
            }
        )
        if n % 25 == 0:
            lines.append({"step": n, "eval_loss": loss + 0.12, "eval_tokens": 65536})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
