"""The executor: runs a program's streams side by side and records when every action really happened.

There is no other training loop. Each stream but `compute` is a thread (gloo tells of an arrival only to
someone who waits for it); `compute` is the calling thread. An action starts when its dependencies are done
and its stream has come to it. When `compute` would wait, a floating action further down may be pulled
forward. Collectives and messages never float.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ratrain.program.action import Action, Kind
from ratrain.program.deps import dependencies
from ratrain.program.program import STREAMS, Program
from ratrain.program.timeline import Row
from ratrain.runtime.device import HostStreams

COMPUTE = "compute"
Handler = Callable[[Action, "Step"], None]

_COMMUNICATES = frozenset(
    {
        Kind.SEND_ACT,
        Kind.RECV_ACT,
        Kind.SEND_GRAD,
        Kind.RECV_GRAD,
        Kind.GRAD_SYNC,
        Kind.TIED_SYNC,
        Kind.PREFETCH_VIEW,
        Kind.GRAD_NORM,
    }
)


@dataclass(eq=False)
class Step:
    """One execution of a program, and what its handlers share. Subclassed by the trainer for its own data.

    `previous` is the step whose deferred work (lag 1) this one carries.
    """

    number: int
    previous: Step | None = None
    done: bytearray = field(default_factory=bytearray, repr=False)
    marks: list[object | None] = field(default_factory=list, repr=False)
    index: dict[Action, int] = field(default_factory=dict, repr=False)
    unfinished: int = 0
    rows: list[Row] = field(default_factory=list, repr=False)

    def of(self, action: Action) -> Step:
        """The step that `action` belongs to in meaning."""
        if action.lag:
            assert self.previous is not None, f"{action} without a previous step"
            return self.previous
        return self


class _Need(NamedTuple):
    """Something unfinished that an action waits for."""

    step: Step
    at: int
    action: Action


@dataclass(frozen=True)
class LoweredLane:
    """One rank's lane with dependencies as positions, and those on the previous step as actions."""

    actions: tuple[Action, ...]
    index: dict[Action, int]
    streams: dict[str, tuple[int, ...]]
    needs: tuple[tuple[int, ...], ...]
    needs_previous: tuple[tuple[Action, ...], ...]
    floats: tuple[int, ...]


def lower_lane(program: Program, stage: int, replica: int) -> LoweredLane:
    """Prepares the lane of one rank for execution."""
    lane = program.lane(stage, replica)
    rules = dependencies(program, stage, replica)
    actions = tuple(a for stream in STREAMS for a in lane.get(stream, ()))
    index = {action: i for i, action in enumerate(actions)}
    return LoweredLane(
        actions,
        index,
        {stream: tuple(index[a] for a in lane.get(stream, ())) for stream in STREAMS},
        tuple(tuple(index[d.action] for d in rules[a] if d.offset == 0) for a in actions),
        tuple(tuple(d.action for d in rules[a] if d.offset) for a in actions),
        tuple(index[a] for a in lane["compute"] if a.kind in program.floating),
    )


class Executor:
    """Runs lowered lanes one after another; the streams of one may still run while the next has begun."""

    def __init__(
        self,
        rank: int,
        handlers: Mapping[Kind, Handler],
        posts: Mapping[Kind, Handler] | None = None,
        device: HostStreams | None = None,
        delay: float = 0.0,
        seed: int = 0,
    ) -> None:
        """
        handlers  one per kind; returns when the action is done (CPU) or enqueued (CUDA)
        posts     for receives: called up to two actions ahead, before the handler that waits
        delay     for tests: largest random extra seconds before a communication counts as done
        """
        self.rank = rank
        self._handlers = dict(handlers)
        self._posts = dict(posts or {})
        self._device = device or HostStreams()
        self._delay = delay
        self._random = random.Random(seed * 7919 + rank)
        self._lock = threading.Lock()
        # One condition per stream, so that an action wakes only the stream that waits for it.
        self._wake = {stream: threading.Condition(self._lock) for stream in STREAMS}
        self._waits_for: dict[str, _Need | None] = dict.fromkeys(STREAMS)
        self._queues: dict[str, deque[tuple[LoweredLane, Step]]] = {}
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._closed = False
        for stream in STREAMS:
            if stream != COMPUTE:
                self._queues[stream] = deque()
                thread = threading.Thread(target=self._serve, args=(stream,), name=stream, daemon=True)
                self._threads.append(thread)
                thread.start()

    def run(self, lane: LoweredLane, step: Step) -> None:
        """Executes `lane` as `step`; returns when its compute stream is through. Re-raises what a stream
        raised."""
        step.done = bytearray(len(lane.actions))
        step.marks = [None] * len(lane.actions)
        step.index = lane.index
        step.unfinished = len(lane.actions)
        with self._lock:
            for stream, queue in self._queues.items():
                if lane.streams[stream]:
                    queue.append((lane, step))
                    self._wake[stream].notify()
        self._compute(lane, step)

    def finish(self, step: Step) -> None:
        """Waits until every stream is through with `step`."""
        with self._lock:
            while step.unfinished and self._error is None:
                self._wake[COMPUTE].wait()
        self._raise()
        self._device.drain()

    def close(self) -> None:
        """Ends the threads once their queues are empty."""
        with self._lock:
            self._closed = True
            self._notify_all()
        for thread in self._threads:
            thread.join(timeout=5)

    def _compute(self, lane: LoweredLane, step: Step) -> None:
        floats = deque(lane.floats)
        for at in lane.streams[COMPUTE]:
            if step.done[at]:
                continue  # a float, pulled forward
            waited: Action | None = None
            while True:
                with self._lock:
                    self._raise()
                    need = self._unmet(lane, step, at)
                    if need is None:
                        break
                    pulled = self._next_float(lane, step, floats)
                    if pulled is None:
                        waited = need.action
                        self._wake[COMPUTE].wait()
                        continue
                self._do(lane, step, pulled, COMPUTE, waited)
                waited = None
            self._do(lane, step, at, COMPUTE, waited)

    def _next_float(self, lane: LoweredLane, step: Step, floats: deque[int]) -> int | None:
        """The first floating action of the list that could run now."""
        while floats and step.done[floats[0]]:
            floats.popleft()
        for at in floats:
            if not step.done[at] and self._unmet(lane, step, at) is None:
                return at
        return None

    def _unmet(self, lane: LoweredLane, step: Step, at: int) -> _Need | None:
        """An unfinished dependency of the action at `at`, or None. Call with the lock held."""
        for i in lane.needs[at]:
            if not step.done[i]:
                return _Need(step, i, lane.actions[i])
        before = step.previous
        if before is not None:
            for action in lane.needs_previous[at]:
                k = before.index.get(action)
                if k is not None and not before.done[k]:
                    return _Need(before, k, action)
        return None

    def _marks(self, lane: LoweredLane, step: Step, at: int) -> list[object]:
        marks = [step.marks[i] for i in lane.needs[at]]
        before = step.previous
        if before is not None:
            marks += [before.marks[before.index[a]] for a in lane.needs_previous[at] if a in before.index]
        return [mark for mark in marks if mark is not None]

    def _do(self, lane: LoweredLane, step: Step, at: int, stream: str, waited: Action | None) -> None:
        action = lane.actions[at]
        start = time.perf_counter()
        with self._device.on(stream):
            self._device.await_marks(self._marks(lane, step, at))
            self._handlers[action.kind](action, step)
            mark = self._device.mark()
        if self._delay and action.kind in _COMMUNICATES:
            time.sleep(self._random.uniform(0, self._delay))
        end = time.perf_counter()
        with self._lock:
            step.rows.append(Row(self.rank, step.number, stream, action, start, end, waited))
            step.done[at] = 1
            step.marks[at] = mark
            step.unfinished -= 1
            for other, need in self._waits_for.items():
                if need is not None and need.at == at and need.step is step:
                    self._wake[other].notify()
            if stream != COMPUTE:  # a float may have become possible, or the step may be through
                self._wake[COMPUTE].notify()

    def _serve(self, stream: str) -> None:
        """A stream's thread: its actions in order, each as soon as its dependencies are done."""
        queue = self._queues[stream]
        try:
            while True:
                with self._lock:
                    while not queue and not self._closed and self._error is None:
                        self._wake[stream].wait()
                    if not queue or self._error is not None:
                        return
                    lane, step = queue[0]
                self._serve_lane(stream, lane, step)
                with self._lock:
                    queue.popleft()
        except BaseException as error:
            with self._lock:
                if self._error is None:
                    self._error = error
                self._notify_all()

    def _serve_lane(self, stream: str, lane: LoweredLane, step: Step) -> None:
        order = lane.streams[stream]
        posted = 0
        for position, at in enumerate(order):
            post = self._posts.get(lane.actions[at].kind)
            with self._lock:
                while (need := self._unmet(lane, step, at)) is not None and self._error is None:
                    self._waits_for[stream] = need
                    self._wake[stream].wait()
                self._waits_for[stream] = None
                if self._error is not None:
                    return
                ahead = position + 1
                if post is not None:
                    while ahead < len(order) and self._unmet(lane, step, order[ahead]) is None:
                        ahead += 1
            if post is not None:
                with self._device.on(stream):
                    for later in order[posted:ahead]:
                        self._device.await_marks(self._marks(lane, step, later))
                        post(lane.actions[later], step)
                posted = max(posted, ahead)
            self._do(lane, step, at, stream, None)

    def _notify_all(self) -> None:
        for condition in self._wake.values():
            condition.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
