"""The checker: is a program legal, does it deadlock, does it fit? Every program passes it before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratrain.program.action import Action, Kind
from ratrain.program.collector import uncollected
from ratrain.program.graph import Graph, Ints, group, lower, meeting
from ratrain.program.grid import render
from ratrain.program.layout import TIED
from ratrain.program.memory import Footprint, peak
from ratrain.program.program import STREAMS, Lane, Program
from ratrain.program.schedule import keeps_view, reduces_per_microbatch


class Violation(NamedTuple):
    """A broken rule, the action it shows at, where, and a sentence."""

    rule: str
    action: Action | None
    stage: int
    replica: int
    message: str


class ProgramError(Exception):
    """A program that must not run: `violations` has every broken rule, `str` a grid with the first marked."""

    def __init__(self, program: Program, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        lines = [f"{v.rule}: {v.message}" for v in violations[:8]]
        if len(violations) > len(lines):
            lines.append(f"and {len(violations) - len(lines)} more")
        super().__init__("\n".join(lines) + "\n" + render(program, mark=violations[0].action))


def require_legal(
    program: Program, footprints: Sequence[Footprint] | None = None, budget: int | None = None
) -> None:
    """Raises ProgramError if `check` finds anything."""
    violations = check(program, footprints, budget)
    if violations:
        raise ProgramError(program, violations)


@uncollected
def check(
    program: Program, footprints: Sequence[Footprint] | None = None, budget: int | None = None
) -> list[Violation]:
    """Every violation of `program`; an empty list means legal.

    footprints  one per stage; with `budget` (bytes per rank) the memory bound is checked too
    """
    found: list[Violation] = []
    for stage, replica, lane in program.distinct():
        found += _counts(program, stage, replica, lane)
    if not found:
        graph = lower(program)
        found += _order(graph)
    if not found:
        found += _groups(program)
    if not found:
        found += _deadlock(graph)
    if footprints is not None and budget is not None and not found:
        for stage, footprint in enumerate(footprints):
            most = peak(program, stage, footprint)
            if most.total > budget:
                where = f" at {most.action}" if most.action else ""
                found.append(
                    Violation(
                        "memory",
                        most.action,
                        stage,
                        0,
                        f"stage {stage} needs {most.total} bytes of {budget}{where} "
                        f"({most.activations} of them activations)",
                    )
                )
    return found


def expected(program: Program, stage: int) -> Counter[Action]:
    """Every action that a legal lane of `stage` holds, from the layout alone, not from the builder."""
    layout, form, s = program.layout, program.form, stage
    trains, flows = form in ("first", "steady"), form != "flush"
    want: list[Action] = []
    rounds = range(layout.microbatches)
    units = [u.name for u in layout.units[s]]
    per_round = reduces_per_microbatch(layout)
    if flows:
        for j in rounds:
            for block in layout.stages[s]:
                want.append(Action(Kind.FORWARD, s, block, j))
                if trains:
                    want.append(Action(Kind.BACKWARD, s, block, j))
                    want.append(Action(Kind.RELEASE, s, block, j, "act"))
                    if program.keeps(s, block, j) != "keep":
                        want.append(Action(Kind.RECOVER, s, block, j))
                for unit in layout.reads(block):
                    if not keeps_view(layout, unit):
                        for phase in ("fwd", "bwd") if trains else ("fwd",):
                            want.append(Action(Kind.PREFETCH_VIEW, s, unit, j, phase))
                            want.append(Action(Kind.RELEASE, s, unit, j, f"view.{phase}"))
            ends = [(s > 0, Kind.RECV_ACT, Kind.SEND_GRAD)]
            ends.append((s < layout.pipeline - 1, Kind.SEND_ACT, Kind.RECV_GRAD))
            for exists, act, grad in ends:
                if exists:
                    want.append(Action(act, s, None, j))
                    if trains:
                        want.append(Action(grad, s, None, j))
        want.append(Action(Kind.GRAD_NORM, s))
    if trains:
        for unit in units:
            for j in rounds if per_round else ():
                want.append(Action(Kind.GRAD_SYNC, s, unit, j))
                want.append(Action(Kind.RELEASE, s, unit, j, "grad"))
            if layout.replicas > 1 and not per_round:
                want.append(Action(Kind.GRAD_SYNC, s, unit))
        if layout.tied_across and TIED in units:
            want.append(Action(Kind.TIED_SYNC, s, TIED))
    lag = 1 if program.deferred else 0
    if form == "steady" or (form == "first" and not lag) or (form == "flush" and lag):
        for unit in units:
            want.append(Action(Kind.UPDATE_SHARD, s, unit, None, None, lag))
            want.append(Action(Kind.RELEASE, s, unit, None, "grad", lag))
            if layout.replicas > 1 and layout.zero > 0 and keeps_view(layout, unit):
                want.append(Action(Kind.PREFETCH_VIEW, s, unit, None, "fwd", lag))
    return Counter(want)


_MISSING = {
    Kind.RELEASE: "{a} is missing: what it frees would live for ever",
    Kind.GRAD_SYNC: "{a} is missing: replicas would drift apart",
    Kind.TIED_SYNC: "{a} is missing: the tied matrix would differ between first and last stage",
    Kind.UPDATE_SHARD: "{a} is missing: the unit would never be updated",
    Kind.PREFETCH_VIEW: "{a} is missing: the view would be read before it is ready",
    Kind.BACKWARD: "{a} is missing: its gradient would not be contributed",
}
_EXTRA = {
    Kind.BACKWARD: "{a} is listed {n} times: its gradient would be contributed more than once",
    Kind.RELEASE: "{a} is listed {n} times: freed more than once",
}


def _counts(program: Program, stage: int, replica: int, lane: Lane) -> Iterator[Violation]:
    """Completeness: every gradient exactly once, every activation freed exactly once, nothing besides."""
    for stream in lane.keys() - set(STREAMS):
        yield Violation("stream", None, stage, replica, f"unknown stream {stream!r}")
    have = Counter(a for actions in lane.values() for a in actions)
    want = expected(program, stage)
    for action, count in want.items():
        if have[action] < count:
            text = _MISSING.get(action.kind, "{a} is missing")
            yield Violation("missing", action, stage, replica, text.format(a=action))
    for action, count in have.items():
        if count > want[action]:
            text = "{a} does not belong into a {f} program of this layout"
            if want[action]:
                text = _EXTRA.get(action.kind, "{a} is listed {n} times")
            yield Violation("surplus", action, stage, replica, text.format(a=action, n=count, f=program.form))


def _order(graph: Graph) -> Iterator[Violation]:
    """No action stands before something on its own stream that must have finished first."""
    waiting = np.repeat(np.arange(len(graph.actions)), np.diff(graph.indptr))
    needed = graph.indices
    behind = (graph.stream[waiting] == graph.stream[needed]) & (needed > waiting)
    for node, dep in zip(waiting[behind].tolist(), needed[behind].tolist()):
        action, stage, replica = graph.actions[node], *graph.lanes[int(graph.lane[node])]
        message = f"{action} stands before {graph.actions[dep]}, which it needs"
        yield Violation("order", action, stage, replica, message)


def _groups(program: Program) -> Iterator[Violation]:
    """The same order on all members of every process group and on both ends of every link."""
    orders: dict[Hashable, list[tuple[int, int, str, list[Action]]]] = {}
    replicas = sorted({replica for _, replica, _ in program.distinct()})
    for stage in range(len(program.lanes)):
        for replica in replicas:
            for stream, actions in program.lane(stage, replica).items():
                mine: dict[Hashable, list[Action]] = {}
                for action in actions:
                    where = group(action, replica)
                    if where is not None:
                        mine.setdefault(where, []).append(action)
                for where, listed in mine.items():
                    orders.setdefault(where, []).append((stage, replica, stream, listed))
    for where, members in orders.items():
        streams = {(s, r): stream for s, r, stream, _ in members}
        if len(streams) != len(members):
            s, r, _, listed = members[-1]
            yield Violation(
                "group", listed[0], s, r, f"group {where} is used from two streams of stage {s} replica {r}"
            )
            continue
        if len(members) == 1:
            continue
        s0, r0, _, reference = members[0]
        keys = [meeting(a, r0) for a in reference]
        for s, r, _, listed in members[1:]:
            theirs = [meeting(a, r) for a in listed]
            if theirs == keys:
                continue
            at = next(
                (i for i, (x, y) in enumerate(zip(keys, theirs)) if x != y), min(len(keys), len(theirs))
            )
            mine_a = reference[at] if at < len(reference) else None
            yield Violation(
                "group order",
                listed[at] if at < len(listed) else mine_a,
                s,
                r,
                f"group {where}: entry {at} is {listed[at] if at < len(listed) else 'nothing'} on stage {s} "
                f"replica {r} but {mine_a or 'nothing'} on stage {s0} replica {r0}",
            )


def _deadlock(graph: Graph) -> Iterator[Violation]:
    """Runs the program without durations; a ring of actions that wait for each other is a deadlock."""
    ring = waiting_ring(graph)
    if ring:
        action = graph.actions[ring[0]]
        stage, replica = graph.lanes[int(graph.lane[ring[0]])]
        chain = " after ".join(str(graph.actions[n]) for n in [*ring, ring[0]])
        yield Violation("deadlock", action, stage, replica, f"{action} can never start: {chain}")


def waiting_ring(graph: Graph) -> list[int]:
    """Nodes that wait for each other in a ring, each for the next; empty if everything can run.

    Partners of a meeting start together, so a meeting is one vertex here. An update is preferred as the
    ring's first node, then any state work: that is where a wrong pass shows.
    """
    count = len(graph.actions)
    owner = np.where(graph.meeting >= 0, count + graph.meeting, np.arange(count))
    before, after = _edges(graph)
    across = owner[before] != owner[after]
    before, after = before[across], after[across]
    stuck = _never_ready(owner[before], owner[after], count + graph.meetings)
    if not stuck.any():
        return []
    before, after = before[stuck[owner[before]]], after[stuck[owner[before]]]
    vertex = int(np.flatnonzero(stuck)[0])
    path: list[tuple[int, int]] = []  # (vertex, node that waits there)
    seen: dict[int, int] = {}
    while vertex not in seen:
        seen[vertex] = len(path)
        edge = np.flatnonzero(owner[after] == vertex)[0]
        path.append((vertex, int(after[edge])))
        vertex = int(owner[before[edge]])
    ring = [node for _, node in path[seen[vertex] :]]
    rank = {Kind.UPDATE_SHARD: 0, Kind.GRAD_SYNC: 1, Kind.PREFETCH_VIEW: 1, Kind.TIED_SYNC: 1}
    lead = min(range(len(ring)), key=lambda i: (rank.get(graph.actions[ring[i]].kind, 2), i))
    return ring[lead:] + ring[:lead]


def _edges(graph: Graph) -> tuple[Ints, Ints]:
    """Pairs of nodes of which the first must have finished, by dependency or by order in a stream."""
    nodes = np.arange(len(graph.actions), dtype=np.int32)
    waits = np.repeat(nodes, np.diff(graph.indptr))
    follows = np.setdiff1d(nodes, graph.starts)  # all but the first of each stream
    return np.concatenate([graph.indices, follows - 1]), np.concatenate([waits, follows])


def _never_ready(before: Ints, after: Ints, vertices: int) -> NDArray[np.bool_]:
    """Which vertices remain when those that wait for nothing are taken away again and again (Kahn, 1962).

    Lists of numbers, not of lists: the collector of garbage would walk over those for longer than this takes.
    """
    order = np.argsort(before, kind="stable")
    begin = np.searchsorted(before[order], np.arange(vertices + 1)).tolist()
    followers = after[order].tolist()
    waiting = np.bincount(after, minlength=vertices).tolist()
    ready = [v for v in range(vertices) if not waiting[v]]
    while ready:
        vertex = ready.pop()
        for follower in followers[begin[vertex] : begin[vertex + 1]]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return np.array(waiting) > 0
