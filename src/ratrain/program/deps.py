"""What must have finished before an action may start. One function, read by checker, simulator and executor.

Order within a stream is a dependency of its own and not listed here; neither are the partners of a transfer
or a collective (`graph.meeting`), which meet because every rank lists its half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ratrain.program.action import Action, Kind
from ratrain.program.layout import TIED, Layout
from ratrain.program.program import Program
from ratrain.program.recovery import recovery_gates
from ratrain.program.schedule import gradient_order, gradients_in_turn, keeps_view, reduces_per_microbatch

POSTED = 2
"""Messages in flight per direction: receives posted ahead, and sends not yet taken."""

WINDOW = 2
"""Units whose unsharded gradient (ZeRO-2, 3) or gathered view (ZeRO-3) may exist at once."""


class Dep(NamedTuple):
    """`action` of the step `offset` steps away (0: this program, -1: the one before it)."""

    action: Action
    offset: int = 0


def dependencies(program: Program, stage: int, replica: int = 0) -> dict[Action, tuple[Dep, ...]]:
    """For every action of one lane, the local actions that must have finished before it may start."""
    context = _Context(program, stage, replica)
    return {action: tuple(_RULES[action.kind](context, action)) for action in context.actions}


class _Context:
    """What the rules look up: the lane's actions and where the previous step's gradients became final."""

    def __init__(self, program: Program, stage: int, replica: int) -> None:
        lane = program.lane(stage, replica)
        self.program, self.stage, self.layout = program, stage, program.layout
        self.blocks = self.layout.stages[stage]
        self.last_stage = stage == self.layout.pipeline - 1
        self.actions = [a for actions in lane.values() for a in actions]
        self.present = set(self.actions)
        self.readers = {u.name: u.readers for u in self.layout.units[stage]}
        self.recovery_gates = recovery_gates(program, stage)
        self.sync_window = _window(layout=self.layout, stage=stage)
        self.gather_window = _gather_window(lane["compute"], self.layout) if self.layout.zero == 3 else {}

    def final(self, unit: str) -> Action:
        """The action after which `unit`'s gradient of a step is complete on this rank."""
        layout, s = self.layout, self.stage
        if unit == TIED and layout.tied_across:
            return Action(Kind.TIED_SYNC, s, TIED)
        if layout.replicas > 1:
            last = layout.microbatches - 1 if reduces_per_microbatch(layout) else None
            return Action(Kind.GRAD_SYNC, s, unit, last)
        return Action(Kind.BACKWARD, s, self.readers[unit][0], layout.microbatches - 1)

    def view(self, unit: str, lag: int) -> Action:
        """The action that leaves `unit`'s step-long view ready."""
        if self.layout.replicas > 1 and self.layout.zero > 0 and keeps_view(self.layout, unit):
            return Action(Kind.PREFETCH_VIEW, self.stage, unit, None, "fwd", lag)
        return Action(Kind.UPDATE_SHARD, self.stage, unit, None, None, lag)

    def updated(self, action: Action) -> Dep | None:
        """`action`, an update or a gather, where it happens: here at lag 1, or in the step before."""
        if action._replace(lag=1) in self.present:
            return Dep(action._replace(lag=1))
        if self.program.form == "steady" and not self.program.deferred:
            return Dep(action._replace(lag=0), -1)
        return None


def _forward(c: _Context, a: Action) -> list[Dep]:
    assert a.unit is not None and a.microbatch is not None
    j = a.microbatch
    deps = []
    if a.unit == c.blocks[0] and c.stage > 0:
        deps.append(Dep(Action(Kind.RECV_ACT, c.stage, None, j)))
    for unit in c.layout.reads(a.unit):
        if not keeps_view(c.layout, unit):
            deps.append(Dep(Action(Kind.PREFETCH_VIEW, c.stage, unit, j, "fwd")))
        elif j == 0:  # later micro-batches come after this one on the same stream
            ready = c.updated(c.view(unit, 1))
            if ready is not None:
                deps.append(ready)
    if a.unit == c.blocks[-1] and not c.last_stage and j >= POSTED:
        deps.append(Dep(Action(Kind.SEND_ACT, c.stage, None, j - POSTED)))
    return deps


def _recover(c: _Context, a: Action) -> list[Dep]:
    assert a.unit is not None and a.microbatch is not None
    j = a.microbatch
    deps = [Dep(Action(Kind.FORWARD, c.stage, a.unit, j))]
    gate = c.recovery_gates.get((a.unit, j))
    if gate is not None:
        deps.append(Dep(gate))
    if c.program.ahead == 0 and a.unit == c.blocks[-1] and not c.last_stage:  # once the gradient has arrived
        deps.append(Dep(Action(Kind.RECV_GRAD, c.stage, None, j)))
    return deps + _gathered(c, a)


def _backward(c: _Context, a: Action) -> list[Dep]:
    assert a.unit is not None and a.microbatch is not None
    j = a.microbatch
    deps = [Dep(Action(Kind.FORWARD, c.stage, a.unit, j))]
    recover = Action(Kind.RECOVER, c.stage, a.unit, j)
    if recover in c.present:
        deps.append(Dep(recover))
    if a.unit == c.blocks[-1] and not c.last_stage:
        deps.append(Dep(Action(Kind.RECV_GRAD, c.stage, None, j)))
    if a.unit == c.blocks[0] and c.stage > 0 and j >= POSTED:
        deps.append(Dep(Action(Kind.SEND_GRAD, c.stage, None, j - POSTED)))
    for unit in c.layout.reads(a.unit):
        freed = c.sync_window.get((unit, j))
        if freed is not None and c.readers[unit][-1] == a.unit:
            deps.append(Dep(freed))
    return deps + _gathered(c, a)


def _gathered(c: _Context, a: Action) -> list[Dep]:
    assert a.unit is not None
    return [
        Dep(Action(Kind.PREFETCH_VIEW, c.stage, unit, a.microbatch, "bwd"))
        for unit in c.layout.reads(a.unit)
        if not keeps_view(c.layout, unit)
    ]


def _send_act(c: _Context, a: Action) -> list[Dep]:
    return [Dep(Action(Kind.FORWARD, c.stage, c.blocks[-1], a.microbatch))]


def _send_grad(c: _Context, a: Action) -> list[Dep]:
    return [Dep(Action(Kind.BACKWARD, c.stage, c.blocks[0], a.microbatch))]


def _recv(kind: Kind, at: int) -> Callable[[_Context, Action], list[Dep]]:
    def rule(c: _Context, a: Action) -> list[Dep]:
        assert a.microbatch is not None
        if a.microbatch < POSTED:
            return []
        return [Dep(Action(kind, c.stage, c.blocks[at], a.microbatch - POSTED))]

    return rule


def _grad_sync(c: _Context, a: Action) -> list[Dep]:
    assert a.unit is not None
    j = c.layout.microbatches - 1 if a.microbatch is None else a.microbatch
    return [Dep(Action(Kind.BACKWARD, c.stage, c.readers[a.unit][0], j))]


def _tied_sync(c: _Context, a: Action) -> list[Dep]:
    if c.layout.replicas > 1:
        last = c.layout.microbatches - 1 if reduces_per_microbatch(c.layout) else None
        return [Dep(Action(Kind.GRAD_SYNC, c.stage, TIED, last))]
    return [Dep(Action(Kind.BACKWARD, c.stage, c.readers[TIED][0], c.layout.microbatches - 1))]


def _grad_norm(c: _Context, a: Action) -> list[Dep]:
    if c.program.form == "evaluate":
        return [Dep(Action(Kind.FORWARD, c.stage, c.blocks[-1], c.layout.microbatches - 1))]
    return [Dep(c.final(unit)) for unit in c.readers]


def _update_shard(c: _Context, a: Action) -> list[Dep]:
    assert a.unit is not None
    gate = Action(Kind.GRAD_NORM, c.stage) if c.layout.gated else c.final(a.unit)
    return [Dep(gate, -a.lag)]


def _prefetch_view(c: _Context, a: Action) -> list[Dep]:
    assert a.unit is not None
    update = Action(Kind.UPDATE_SHARD, c.stage, a.unit, None, None, a.lag)
    if a.microbatch is None:
        return [Dep(update)]
    deps = []
    fresh = c.updated(update) if (a.microbatch, a.phase) == (0, "fwd") else None
    if fresh is not None:
        deps.append(fresh)
    freed = c.gather_window.get(a)
    if freed is not None:
        deps.append(Dep(freed))
    return deps


def _release(c: _Context, a: Action) -> list[Dep]:
    s, j = c.stage, a.microbatch
    if a.phase == "act":
        return [Dep(Action(Kind.BACKWARD, s, a.unit, j))]
    if a.phase == "grad":
        if j is None:
            return [Dep(Action(Kind.UPDATE_SHARD, s, a.unit, None, None, a.lag))]
        return [Dep(Action(Kind.GRAD_SYNC, s, a.unit, j))]
    assert a.unit is not None
    kind = Kind.FORWARD if a.phase == "view.fwd" else Kind.BACKWARD
    return [Dep(Action(kind, s, block, j)) for block in c.readers[a.unit]]


_RULES: dict[Kind, Callable[[_Context, Action], list[Dep]]] = {
    Kind.FORWARD: _forward,
    Kind.BACKWARD: _backward,
    Kind.RECOVER: _recover,
    Kind.SEND_ACT: _send_act,
    Kind.RECV_ACT: _recv(Kind.FORWARD, 0),
    Kind.SEND_GRAD: _send_grad,
    Kind.RECV_GRAD: _recv(Kind.BACKWARD, -1),
    Kind.GRAD_SYNC: _grad_sync,
    Kind.TIED_SYNC: _tied_sync,
    Kind.GRAD_NORM: _grad_norm,
    Kind.UPDATE_SHARD: _update_shard,
    Kind.PREFETCH_VIEW: _prefetch_view,
    Kind.RELEASE: _release,
}


def _window(layout: Layout, stage: int) -> dict[tuple[str, int], Action]:
    """Per (unit, micro-batch) the gradient release that must precede its backward, under ZeRO-2 and 3.

    A tied matrix read twice on one stage has a buffer of its own.
    """
    if not reduces_per_microbatch(layout):
        return {}
    shared = gradients_in_turn(layout, stage)
    alone = set(gradient_order(layout, stage)) - set(shared)
    window = {}
    for j in range(layout.microbatches):
        for k, unit in enumerate(shared):
            n = j * len(shared) + k - WINDOW
            if n >= 0:
                window[unit, j] = Action(
                    Kind.RELEASE, stage, shared[n % len(shared)], n // len(shared), "grad"
                )
        for unit in alone if j > 0 else ():
            window[unit, j] = Action(Kind.RELEASE, stage, unit, j - 1, "grad")
    return window


def _gather_window(compute: tuple[Action, ...], layout: Layout) -> dict[Action, Action]:
    """Per gather of ZeRO-3 the view release that must precede it, in the order of use on `compute`."""
    releases = [a for a in compute if a.kind is Kind.RELEASE and (a.phase or "").startswith("view.")]
    window = {}
    for freed, user in zip(releases, releases[WINDOW:]):
        assert user.phase is not None
        gather = Action(Kind.PREFETCH_VIEW, user.stage, user.unit, user.microbatch, user.phase[5:])
        window[gather] = freed
    return window
