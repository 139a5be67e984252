"""cost(action): what each action of a plan's program takes, alone. What the simulator asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from ratrain.machine.platform import Platform
from ratrain.machine.profile import Profile
from ratrain.model.spec import ModelSpec
from ratrain.model.tensor_slice import ALL_REDUCES, tensor_slice
from ratrain.plan.compute import BlockSeconds, Compute
from ratrain.plan.memory import StateModel, activation_model, memory_program
from ratrain.plan.network import Flow, Network
from ratrain.plan.plan import Plan
from ratrain.program.action import Action, Kind
from ratrain.program.layout import EMBED, HEAD
from ratrain.program.program import Program
from ratrain.simulate.cost import Cost, Port
from ratrain.simulate.cost import Network as Ports

LEVELS = ("within_node", "between_nodes")

_ADDITION, _COPY = 3, 2
"""Memory traffic of adding one vector to another, and of a copy, in multiples of what a norm reads."""


class Costs:
    """Prices the actions of one plan on one machine.

    Link loads are in seconds at full speed, so every port has capacity 1. A rank's ports are its own link and
    its share of the node's uplink, each way: (level, stage, direction).

    joined  whether a block's time has the tensor ranks' all-reduces in it
    """

    def __init__(self, spec: ModelSpec, plan: Plan, compute: Compute, joined: bool = True) -> None:
        self.plan, self.compute, self.joined = plan, compute, joined
        self.spec = tensor_slice(spec, plan.tensor)
        self.layout = plan.layout()
        self.states, self.message = StateModel.of(spec, plan), activation_model(spec, plan).message
        self.links = Network(compute.source, plan.data, plan.tensor)

    def __call__(self, action: Action) -> Cost:
        """The cost of `action` on one rank; the same for every micro-batch."""
        return _HANDLERS[action.kind](self, action)

    @property
    def ports(self) -> Ports:
        """Every port, and how much a transfer slows computing down."""
        source = self.compute.source
        slowdown, drag = 1.0, 1.0
        if isinstance(source, Platform):
            slowdown = source.device.slowdown_under_communication
        elif isinstance(source, Profile):
            slowdown, drag = source.slowdown_under_communication, source.drag_under_compute
        stages = range(self.plan.pipeline)
        directions = ("out", "in", "both")
        capacity: dict[Port, float] = {
            (level, s, d): 1.0 for level in LEVELS for s in stages for d in directions
        }
        return Ports(capacity, slowdown, drag)

    def block(self, name: str) -> BlockSeconds:
        """Seconds of a block, its tensor-parallel all-reduces included."""
        plain = self.compute.block(self.spec, name, self.plan.micro_batch, self.plan.seq_len)
        return (
            with_tensor(plain, name, self.links.over_tensor(self.message).seconds) if self.joined else plain
        )

    def forward(self, a: Action) -> Cost:
        """FORWARD of a block."""
        return Cost(self._passes(a)[0])

    def backward(self, a: Action) -> Cost:
        """BACKWARD of a block, without recovery."""
        return Cost(self._passes(a)[1])

    def recover(self, a: Action) -> Cost:
        """RECOVER of a block from its rung."""
        return Cost(self.block(a.unit or "").recover[self.layout.rung(a.stage, a.unit or "")])

    def update(self, a: Action) -> Cost:
        """UPDATE_SHARD: the owned part of a unit."""
        return Cost(self.compute.update(self._owned(a.unit)))

    def send(self, a: Action) -> Cost:
        """SEND_ACT, SEND_GRAD."""
        return self._moved(a.stage, self.links.message(self.message), ("out",))

    def receive(self, a: Action) -> Cost:
        """RECV_ACT, RECV_GRAD."""
        return self._moved(a.stage, self.links.message(self.message), ("in",))

    def synchronise(self, a: Action) -> Cost:
        """GRAD_SYNC: ZeRO-0 needs the whole sum on every replica, ZeRO-2 and 3 add the micro-batch's to their shard."""
        kind = "reduce_scatter" if self.plan.zero else "all_reduce"
        size = self.states.padded(a.unit or "") * self.plan.precision.reduce_bytes
        moved = self._moved(a.stage, self.links.over_replicas(kind, size), ("out", "in"))  # type: ignore[arg-type]
        if self.plan.zero < 2:
            return moved
        return moved._replace(seconds=moved.seconds + _ADDITION * self.compute.norm(self._owned(a.unit)))

    def tied(self, a: Action) -> Cost:
        """TIED_SYNC: first and last stage exchange what they own of the matrix's gradient."""
        flow = self.links.message(self._owned(a.unit) * self.plan.precision.grad_bytes)
        return self._moved(a.stage, flow, ("out", "in"))

    def norm(self, a: Action) -> Cost:
        """GRAD_NORM: every rank's own squares, then a small exchange."""
        owned = sum(self._owned(unit.name) for unit in self.layout.units[a.stage])
        return Cost(self.compute.norm(owned) + self.links.rendezvous(self.plan.ranks).latency)

    def gather(self, a: Action) -> Cost:
        """PREFETCH_VIEW: under ZeRO-3 the own part is copied in first."""
        size = self.states.padded(a.unit or "") * self.plan.precision.view_bytes
        moved = self._moved(a.stage, self.links.over_replicas("all_gather", size), ("out", "in"))
        if self.plan.zero < 3:
            return moved
        return moved._replace(seconds=moved.seconds + _COPY * self.compute.norm(self._owned(a.unit)))

    def release(self, a: Action) -> Cost:
        """RELEASE is free."""
        return Cost(0.0)

    def _owned(self, unit: str | None) -> int:
        """Parameters of a unit that a rank updates."""
        size = self.states.padded(unit or "")
        return size // self.plan.data if self.plan.zero else size

    def _passes(self, a: Action) -> tuple[float, float]:
        """Forward and backward of the action's block."""
        block = self.block(a.unit or "")
        return block.on(self._rung(a) if block.passes else "keep")

    def _rung(self, a: Action) -> str:
        """What most of the block's micro-batches keep: the program says for which nothing is dropped."""
        program = self._short_program
        return program.keeps(a.stage, a.unit or "", program.layout.microbatches // 2)

    @cached_property
    def _short_program(self) -> Program:
        return memory_program(self.plan)

    def _moved(self, stage: int, flow: Flow, directions: tuple[str, ...]) -> Cost:
        loads: dict[tuple[str, int, str], float] = {}
        for level, seconds in zip(LEVELS, (flow.within, flow.between)):
            if seconds > 0:
                for direction in directions:
                    port = (level, stage, "both" if self.links.half_duplex(level) else direction)
                    loads[port] = loads.get(port, 0.0) + seconds
        return Cost(flow.latency, tuple(loads.items()), flow.connections)


def with_tensor(plain: BlockSeconds, block: str, joined: float) -> BlockSeconds:
    """Adds the tensor ranks' all-reduces, `joined` seconds each: two a pass of a layer (one of them again in a
    recovery that runs attention again), one of embedding and head."""
    if joined == 0.0:
        return plain
    times = 1 if block in (EMBED, HEAD) else ALL_REDUCES
    return plain.changed(plus=times * joined, recover_plus=joined)


_HANDLERS: dict[Kind, Callable[[Costs, Action], Cost]] = {
    Kind.FORWARD: Costs.forward,
    Kind.BACKWARD: Costs.backward,
    Kind.RECOVER: Costs.recover,
    Kind.UPDATE_SHARD: Costs.update,
    Kind.SEND_ACT: Costs.send,
    Kind.SEND_GRAD: Costs.send,
    Kind.RECV_ACT: Costs.receive,
    Kind.RECV_GRAD: Costs.receive,
    Kind.GRAD_SYNC: Costs.synchronise,
    Kind.TIED_SYNC: Costs.tied,
    Kind.GRAD_NORM: Costs.norm,
    Kind.PREFETCH_VIEW: Costs.gather,
    Kind.RELEASE: Costs.release,
}
