"""A slow, obvious simulator in exact fractions, to compare the engine with.

It keeps what is running in a list and looks at everything again whenever anything ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from ratrain.program.action import Action
from ratrain.program.deps import dependencies
from ratrain.program.graph import meeting
from ratrain.program.program import STREAMS, Program
from ratrain.simulate.cost import Cost, Network

Where = tuple[int, int, Action]
"""Lane, step, action."""


@dataclass
class Running:
    """Local actions (`members` is one) or a meeting; `left` seconds, or share of its bytes once `flows`."""

    members: list[Where]
    left: Fraction
    loads: dict[object, Fraction] = field(default_factory=dict)
    flows: bool = False
    connections: int = 1


class Reference:
    """start, end: {(lane, step, action): time}; lanes are stages, replicas taken as identical."""

    def __init__(
        self, program: Program, cost: Callable[[Action], Cost], network: Network, steps: int
    ) -> None:
        self.program, self.cost, self.network, self.steps = program, cost, network, steps
        self.lanes = range(program.layout.pipeline)
        self.needs = [dependencies(program, s) for s in self.lanes]
        self.lists = {
            (s, stream): [(s, k, a) for k in range(steps) for a in program.lane(s).get(stream, ())]
            for s in self.lanes
            for stream in STREAMS
        }
        self.members: dict[object, set[int]] = {}
        for s in self.lanes:
            for actions in program.lane(s).values():
                for action in actions:
                    if meeting(action, 0) is not None:
                        self.members.setdefault(meeting(action, 0), set()).add(s)
        self.start: dict[Where, Fraction] = {}
        self.end: dict[Where, Fraction] = {}
        self.running: list[Running] = []
        self.occupied: set[tuple[int, str]] = set()
        self.came: dict[object, list[Where]] = {}
        self.now = Fraction(0)
        self._run()

    def _met(self, where: Where) -> bool:
        s, k, action = where
        for dep in self.needs[s][action]:
            other = (s, k + dep.offset, dep.action)
            if k + dep.offset >= 0 and other[2] in self.needs[s] and other not in self.end:
                return False
        return True

    def _head(self, s: int, stream: str) -> Where | None:
        return next((w for w in self.lists[s, stream] if w not in self.start), None)

    def _run(self) -> None:
        while True:
            while self._start_anything() or self._start_a_float():
                self._end_what_is_through()
            if not self.running:
                break
            paces = [self._pace(job) for job in self.running]
            wait = min(job.left / pace for job, pace in zip(self.running, paces))
            for job, pace in zip(self.running, paces):
                job.left -= wait * pace
            self.now += wait
            self._end_what_is_through()
        assert len(self.end) == sum(len(actions) for actions in self.lists.values()), "deadlock"

    def _start_anything(self) -> bool:
        moved = False
        for s, stream in self.lists:
            head = self._head(s, stream)
            if head is not None and (s, stream) not in self.occupied and self._met(head):
                self._begin(head, stream)
                moved = True
        return moved

    def _start_a_float(self) -> bool:
        for s in self.lanes:
            head = self._head(s, "compute")
            if head is None or (s, "compute") in self.occupied:
                continue
            for where in self.lists[s, "compute"]:
                floats = where[1] == head[1] and where[2].kind in self.program.floating
                if floats and where not in self.start and self._met(where):
                    self._begin(where, "compute")
                    return True
        return False

    def _begin(self, where: Where, stream: str) -> None:
        s, k, action = where
        self.start[where] = self.now
        self.occupied.add((s, stream))
        meets = meeting(action, 0)
        if meets is None:
            seconds = 0 if action.kind == "RELEASE" else self.cost(action).seconds
            self.running.append(Running([where], Fraction(seconds)))
            return
        came = self.came.setdefault((k, meets), [])
        came.append(where)
        if len(came) == len(self.members[meets]):
            costs = [self.cost(w[2]) for w in came]
            loads: dict[object, Fraction] = {}
            for port, size in (load for c in costs for load in c.loads):
                loads[port] = loads.get(port, Fraction(0)) + Fraction(size)
            latency, connections = max(c.seconds for c in costs), max(c.connections for c in costs)
            self.running.append(Running(came, Fraction(latency), loads, connections=connections))

    def _end_what_is_through(self) -> None:
        for job in list(self.running):
            if job.left > 0:
                continue
            if job.loads and not job.flows:
                job.flows, job.left = True, Fraction(1)
                continue
            self.running.remove(job)
            for where in job.members:
                self.end[where] = self.now
                stream = next(n for n in STREAMS if where[2] in self.program.lane(where[0]).get(n, ()))
                self.occupied.discard((where[0], stream))

    def _pace(self, job: Running) -> Fraction:
        s = job.members[0][0]
        meetings = [other for other in self.running if self._meets(other)]
        if not self._meets(job):
            slow = any(w[0] == s for other in meetings for w in other.members)
            return 1 / Fraction(self.network.slowdown) if slow and self._computes(job) else Fraction(1)
        pace = Fraction(1)
        if job.flows:
            flowing = [other for other in meetings if other.flows]
            pace = min(
                Fraction(self.network.capacity[port])
                * Fraction(job.connections, sum(o.connections for o in flowing if port in o.loads))
                / size
                for port, size in job.loads.items()
            )
        computing = {lane for o in self.running if self._computes(o) for lane, _, _ in o.members}
        dragged = any(lane in computing for lane, _, _ in job.members)
        return pace / Fraction(self.network.drag) if dragged else pace

    def _meets(self, job: Running) -> bool:
        return meeting(job.members[0][2], 0) is not None

    def _computes(self, job: Running) -> bool:
        s, _, action = job.members[0]
        return action in self.program.lane(s)["compute"] and meeting(action, 0) is None
