"""Lowering: a program as integer arrays, with every dependency and every meeting of ranks made explicit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratrain.program.action import Action, Kind
from ratrain.program.collector import uncollected
from ratrain.program.deps import dependencies
from ratrain.program.program import STREAMS, Program

Ints = NDArray[np.int32]

_LOCAL = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.RECOVER, Kind.UPDATE_SHARD, Kind.RELEASE})
"""Kinds that concern one rank alone."""


def group(action: Action, replica: int) -> Hashable | None:
    """The process group (or directed link) in which `action` meets its partners; None for local actions.

    Order within one group must be the same on all its members.
    """
    kind, s = action.kind, action.stage
    if kind in _LOCAL:
        return None
    if kind in (Kind.SEND_ACT, Kind.RECV_ACT):
        return ("act", s + (kind is Kind.SEND_ACT), replica)  # named after the receiving stage
    if kind in (Kind.SEND_GRAD, Kind.RECV_GRAD):
        return ("grad", s - (kind is Kind.SEND_GRAD), replica)
    if kind is Kind.GRAD_SYNC:
        return ("sync", s)
    if kind is Kind.PREFETCH_VIEW:
        return ("prefetch", s)
    if kind is Kind.TIED_SYNC:
        return ("tied", replica)
    return ("world",)


def meeting(action: Action, replica: int) -> Hashable | None:
    """Identifies the one transfer or collective that `action` takes part in; equal for all partners."""
    where = group(action, replica)
    if where is None:
        return None
    return (where, action.unit, action.microbatch, action.phase, action.lag)


@dataclass(frozen=True)
class Graph:
    """A lowered program. Nodes are numbered lane by lane, stream by stream, in list order.

    actions      the action of each node
    lanes        (stage, replica) of each lane that was lowered
    lane         lane index of each node
    stream       index into STREAMS of each node
    starts       first node of each (lane, stream), row by lane; one more entry closes the last
    indptr, indices            CSR: local dependencies inside this program
    before_indptr, before      CSR: dependencies on the previous step, as nodes of *this* lowering when the
                               steady program repeats; -1 where this program has no such action
    meeting      per node the number of its transfer or collective, -1 for local actions
    meetings     how many there are
    """

    actions: list[Action]
    lanes: list[tuple[int, int]]
    lane: Ints
    stream: Ints
    starts: Ints
    indptr: Ints
    indices: Ints
    before_indptr: Ints
    before: Ints
    meeting: Ints
    meetings: int


@uncollected
def lower(program: Program) -> Graph:
    """Lowers the distinct lanes of `program`. Identical replicas are lowered once.

    A dependency on an action that the lane does not list raises KeyError naming both: the checker reports
    that case before it comes here.
    """
    replicas = sorted({replica for _, replica, _ in program.distinct()})
    lanes = [(stage, replica) for stage in range(len(program.lanes)) for replica in replicas]
    actions: list[Action] = []
    lane_of: list[int] = []
    stream_of: list[int] = []
    starts = [0]
    indices: list[int] = []
    indptr = [0]
    before: list[int] = []
    before_indptr = [0]
    meeting_of: list[int] = []
    numbers: dict[Hashable, int] = {}
    for number, (stage, replica) in enumerate(lanes):
        lane = program.lane(stage, replica)
        node: dict[Action, int] = {}
        base = len(actions)
        for code, stream in enumerate(STREAMS):
            for action in lane.get(stream, ()):
                node[action] = len(actions)
                actions.append(action)
                stream_of.append(code)
            starts.append(len(actions))
        lane_of += [number] * (len(actions) - base)
        rules = dependencies(program, stage, replica)
        for action in actions[base:]:
            for dep in rules[action]:
                if dep.offset == 0:
                    if dep.action not in node:
                        raise KeyError(f"{action} needs {dep.action}, which its rank does not list")
                    indices.append(node[dep.action])
                else:
                    before.append(node.get(dep.action, -1))
            indptr.append(len(indices))
            before_indptr.append(len(before))
            where = meeting(action, replica)
            meeting_of.append(-1 if where is None else numbers.setdefault(where, len(numbers)))
    return Graph(
        actions=actions,
        lanes=lanes,
        lane=np.array(lane_of, dtype=np.int32),
        stream=np.array(stream_of, dtype=np.int32),
        starts=np.array(starts, dtype=np.int32),
        indptr=np.array(indptr, dtype=np.int32),
        indices=np.array(indices, dtype=np.int32),
        before_indptr=np.array(before_indptr, dtype=np.int32),
        before=np.array(before, dtype=np.int32),
        meeting=np.array(meeting_of, dtype=np.int32),
        meetings=len(numbers),
    )
