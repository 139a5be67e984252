"""What no schedule of a layout can beat: a bound on the step that needs no program, for pruning a search."""

from __future__ import annotations

from collections import Counter

from ratrain.program.action import Action, Kind
from ratrain.program.layout import TIED, Layout
from ratrain.program.schedule import keeps_view, reduces_per_microbatch
from ratrain.simulate.cost import Cost, CostOf, Network, Port


def lower_bound(layout: Layout, cost: CostOf, network: Network) -> float:
    """Seconds from a stage's first forward to its next step's, at least, under 1F1B and any passes.

    The longest of three: the fullest port's bytes over its capacity, what `_around_synchronisation` says, and
    the longest over stages s of
        M forwards and backwards of s, and of its recovery
      + at the step's start, where the first gradient is still on its way through the later stages, what
        the warm-up forwards do not fill; and the same at its end, after the last forward
      + the last gradient's way to the first stage, and the next step's first activation back to s
      + on the first stage the last gradient's synchronisation, its update and its gather.
    For equal stages without communication or recovery this is (M + P - 1) (f + b), which 1F1B reaches.
    """
    stages = range(layout.pipeline)
    rounds = layout.microbatches
    forward = [_total(layout, cost, Kind.FORWARD, s) for s in stages]
    backward = [_total(layout, cost, Kind.BACKWARD, s) for s in stages]
    # Per stage the way of one micro-batch from its own forward's end to its gradient's arrival, and the way
    # from its own backward's end over the first stage to the next step's activation.
    hops = [_meeting(network, cost, _hop(s)) for s in stages]
    later = [0.0] * layout.pipeline
    for s in reversed(stages[:-1]):
        later[s] = later[s + 1] + forward[s + 1] + backward[s + 1] + hops[s + 1]
    earlier = [0.0] * layout.pipeline
    for s in stages[1:]:
        earlier[s] = earlier[s - 1] + forward[s - 1] + backward[s - 1] + hops[s]
    turn = _turn(layout, cost, network)
    most = max(_fullest_port(layout, cost, network), _around_synchronisation(layout, cost, network))
    for s in stages:
        warm, f, b = layout.warmup(s, layout.grouped), forward[s], backward[s]
        if rounds > warm + 1:
            waits = max(0.0, later[s] - warm * f) + max(0.0, later[s] - warm * b)
        else:  # all forwards come before the first backward: one wait, after the first or the last
            waits = max(0.0, later[s] - (rounds - 1) * min(f, b))
        recovery = 0.0
        if not (layout.elide and (s == layout.pipeline - 1 or rounds == 1)):
            dropped = [block for block in layout.stages[s] if layout.rung(s, block) != "keep"]
            recovery = rounds * sum(cost(Action(Kind.RECOVER, s, block, 0)).seconds for block in dropped)
        most = max(most, rounds * (f + b) + max(waits, recovery) + earlier[s] + turn)
    return most


def _total(layout: Layout, cost: CostOf, kind: Kind, stage: int) -> float:
    return sum(cost(Action(kind, stage, block, 0)).seconds for block in layout.stages[stage])


def _hop(stage: int) -> list[list[Action]]:
    """Both messages between `stage` and the one before it."""
    if stage == 0:
        return []
    act = [Action(Kind.SEND_ACT, stage - 1, None, 0), Action(Kind.RECV_ACT, stage, None, 0)]
    return [act, [Action(Kind.SEND_GRAD, stage, None, 0), Action(Kind.RECV_GRAD, stage - 1, None, 0)]]


def _meeting(network: Network, cost: CostOf, meetings: list[list[Action]]) -> float:
    """Seconds of meetings one after another, each alone on its ports."""
    total = 0.0
    for members in meetings:
        costs = [cost(action) for action in members]
        loads = _sum(costs)
        flow = max((size / network.capacity[port] for port, size in loads.items()), default=0.0)
        total += max(c.seconds for c in costs) + flow
    return total


def _sum(costs: list[Cost]) -> Counter[Port]:
    loads: Counter[Port] = Counter()
    for priced in costs:
        for port, size in priced.loads:
            loads[port] += size  # type: ignore[assignment]
    return loads


def _turn(layout: Layout, cost: CostOf, network: Network) -> float:
    """From the first stage's last backward to its next first forward: the unit it updates last, read first."""
    unit = layout.units[0][0].name
    last = layout.microbatches - 1 if reduces_per_microbatch(layout) else None
    chain: list[list[Action]] = []
    if layout.replicas > 1:
        chain.append([Action(Kind.GRAD_SYNC, 0, unit, last)])
    if layout.gated:
        chain.append([Action(Kind.GRAD_NORM, s) for s in range(layout.pipeline)])
    if layout.replicas > 1 and layout.zero > 0 and keeps_view(layout, unit):
        chain.append([Action(Kind.PREFETCH_VIEW, 0, unit, None, "fwd")])
    elif layout.replicas > 1 and not keeps_view(layout, unit):
        chain.append([Action(Kind.PREFETCH_VIEW, 0, unit, 0, "fwd")])
    if layout.tied_across and unit == TIED:
        both = [Action(Kind.TIED_SYNC, s, TIED) for s in (0, layout.pipeline - 1)]
        chain.insert(1 if layout.replicas > 1 else 0, both)
    return _meeting(network, cost, chain) + cost(Action(Kind.UPDATE_SHARD, 0, unit)).seconds


def _around_synchronisation(layout: Layout, cost: CostOf, network: Network) -> float:
    """The longest over stages s of what no schedule runs at the same time: all transfers of the stage's state, and
    what lies between their end and their next beginning.

    No unit of s is reduced before the last block's last backward, and no view comes after the last block's first
    forward. Between these two lie, of k grouped micro-batches, M - k forwards and backwards of s and k of its last
    block; or of a later stage all M, and the first activation's way there and the last gradient's way back.
    """
    if layout.replicas == 1 or reduces_per_microbatch(layout):
        return 0.0
    rounds, alone = layout.microbatches, layout.microbatches - min(layout.grouped, layout.microbatches)
    busy = [
        _total(layout, cost, Kind.FORWARD, s) + _total(layout, cost, Kind.BACKWARD, s)
        for s in range(layout.pipeline)
    ]
    longest = 0.0
    for s, blocks in enumerate(layout.stages):
        loads: Counter[Port] = Counter()
        for unit, _ in layout.units[s]:
            loads += _sum([cost(action) for action in _state_transfers(layout, s, unit)])
        moved = max((size / network.capacity[port] for port, size in loads.items()), default=0.0)
        last = sum(cost(Action(kind, s, blocks[-1], 0)).seconds for kind in (Kind.FORWARD, Kind.BACKWARD))
        between = alone * busy[s] + (rounds - alone) * last
        way = last
        for later in range(s + 1, layout.pipeline):
            way += _meeting(network, cost, _hop(later))
            between = max(between, way + rounds * busy[later])
            way += busy[later]
        longest = max(longest, moved + between)
    return longest


def _state_transfers(layout: Layout, stage: int, unit: str) -> list[Action]:
    """A step's, where gradients are summed before they are reduced."""
    moved = [Action(Kind.GRAD_SYNC, stage, unit)]
    if layout.zero > 0:
        moved.append(Action(Kind.PREFETCH_VIEW, stage, unit, None, "fwd"))
    return moved


def _fullest_port(layout: Layout, cost: CostOf, network: Network) -> float:
    """Bytes of a step through its fullest port over that port's capacity."""
    loads: Counter[Port] = Counter()

    def add(times: int, action: Action) -> None:
        for port, size in cost(action).loads:
            loads[port] += times * size  # type: ignore[assignment]

    rounds = layout.microbatches
    for s, units in enumerate(layout.units):
        ends = [(s > 0, Kind.RECV_ACT, Kind.SEND_GRAD)]
        ends.append((s < layout.pipeline - 1, Kind.SEND_ACT, Kind.RECV_GRAD))
        for exists, *kinds in ends:
            for kind in kinds if exists else ():
                add(rounds, Action(kind, s, None, 0))
        for unit, _ in units if layout.replicas > 1 else ():
            if not reduces_per_microbatch(layout):
                for action in _state_transfers(layout, s, unit):
                    add(1, action)
                continue
            add(rounds, Action(Kind.GRAD_SYNC, s, unit, 0))
            if keeps_view(layout, unit):
                add(1, Action(Kind.PREFETCH_VIEW, s, unit, None, "fwd"))
            for phase in ("fwd", "bwd") if not keeps_view(layout, unit) else ():
                add(rounds, Action(Kind.PREFETCH_VIEW, s, unit, 0, phase))
    return max((size / network.capacity[port] for port, size in loads.items()), default=0.0)
