"""`one_f_one_b`: the baseline program. Everything that is not 1F1B itself blocks the compute stream.

The lifecycle passes (`passes.py`) start from this and change only when things happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ratrain.program.action import Action, Kind
from ratrain.program.layout import TIED, Layout
from ratrain.program.program import Lane, Program


def one_f_one_b(layout: Layout, form: str = "steady") -> Program:
    """Standard non-interleaved 1F1B with recovery right before each backward and blocking state work.

    ZeRO-0/1 synchronise, update and gather at the end of the step; ZeRO-2 and 3 reduce each unit's gradient
    right after its backward of each micro-batch; ZeRO-3 gathers a unit's view right before each use.
    """
    lanes = []
    for stage in range(layout.pipeline):
        if form == "flush":
            lane: Lane = {"compute": ()}
        elif form == "evaluate":
            lane = _evaluate_lane(layout, stage)
        else:
            lane = _train_lane(layout, stage)
        lanes.append((lane,) * layout.replicas)
    return Program(layout, form, tuple(lanes))


def compute_order(layout: Layout, stage: int, grouped: int = 1) -> Iterator[tuple[Kind, Sequence[int]]]:
    """Runs of FORWARD and BACKWARD micro-batches of a stage in 1F1B order; a run goes block by block.

    The first `grouped` forwards are one run, and so are as many backwards at the end. Every stage warms up by
    that many forwards less one longer, so that both runs are contiguous in 1F1B and only their inside changes.
    """
    total, warmup = layout.microbatches, layout.warmup(stage, grouped)
    yield Kind.FORWARD, range(grouped)
    for j in range(grouped, min(warmup + 1, total)):
        yield Kind.FORWARD, (j,)
    for j in range(total - grouped):
        yield Kind.BACKWARD, (j,)
        if warmup + 1 + j < total:
            yield Kind.FORWARD, (warmup + 1 + j,)
    yield Kind.BACKWARD, range(total - grouped, total)


def keeps_view(layout: Layout, unit: str) -> bool:
    """Whether `unit`'s view stays whole for the step. A tied matrix always does: two blocks read it."""
    return layout.zero < 3 or layout.replicas == 1 or unit == TIED


def reduces_per_microbatch(layout: Layout) -> bool:
    """ZeRO-2 and 3 hold sharded gradients, so each micro-batch's gradient is reduced by itself."""
    return layout.zero >= 2 and layout.replicas > 1


def gradient_order(layout: Layout, stage: int) -> tuple[str, ...]:
    """Units in the order in which a backward pass completes their gradients."""
    seen: dict[str, str] = {}
    for block in layout.stages[stage]:
        for unit in layout.reads(block):
            seen.setdefault(unit, block)  # the first reader runs backward last
    position = {block: i for i, block in enumerate(layout.stages[stage])}
    return tuple(sorted(seen, key=lambda unit: -position[seen[unit]]))


def gradients_in_turn(layout: Layout, stage: int) -> tuple[str, ...]:
    """`gradient_order` without a tied matrix that the stage reads twice: it fills over the whole backward."""
    return tuple(u for u in gradient_order(layout, stage) if u != TIED or layout.tied_across)


def _train_lane(layout: Layout, stage: int) -> Lane:
    return {"compute": train_compute(layout, stage), **_messages(layout, stage, backward=True)}


def train_compute(layout: Layout, stage: int, grouped: int = 1) -> tuple[Action, ...]:
    """The compute stream of a training step before any work has left it; `grouped` as in `compute_order`."""
    blocks = layout.stages[stage]
    compute: list[Action] = []
    for kind, run in compute_order(layout, stage, grouped):
        if kind is Kind.FORWARD:
            for block in blocks:
                for j in run:
                    compute += _forward(layout, stage, block, j)
        else:
            for block in reversed(blocks):
                for j in run:
                    compute += _backward(layout, stage, block, j)
    return (*compute, *state_work(layout, stage))


def _evaluate_lane(layout: Layout, stage: int) -> Lane:
    compute: list[Action] = []
    for j in range(layout.microbatches):
        for block in layout.stages[stage]:
            compute += _forward(layout, stage, block, j)
    compute.append(Action(Kind.GRAD_NORM, stage))
    return {"compute": tuple(compute), **_messages(layout, stage, backward=False)}


def _forward(layout: Layout, stage: int, block: str, j: int) -> list[Action]:
    gathered = [u for u in layout.reads(block) if not keeps_view(layout, u)]
    return [
        *(Action(Kind.PREFETCH_VIEW, stage, u, j, "fwd") for u in gathered),
        Action(Kind.FORWARD, stage, block, j),
        *(Action(Kind.RELEASE, stage, u, j, "view.fwd") for u in gathered),
    ]


def _backward(layout: Layout, stage: int, block: str, j: int) -> list[Action]:
    gathered = [u for u in layout.reads(block) if not keeps_view(layout, u)]
    actions = [Action(Kind.PREFETCH_VIEW, stage, u, j, "bwd") for u in gathered]
    if layout.rung(stage, block) != "keep":
        actions.append(Action(Kind.RECOVER, stage, block, j))
    actions.append(Action(Kind.BACKWARD, stage, block, j))
    actions.append(Action(Kind.RELEASE, stage, block, j, "act"))
    actions += [Action(Kind.RELEASE, stage, u, j, "view.bwd") for u in gathered]
    if reduces_per_microbatch(layout):
        for unit in layout.units[stage]:
            if unit.readers[0] == block and unit.name in layout.reads(block):
                actions.append(Action(Kind.GRAD_SYNC, stage, unit.name, j))
                actions.append(Action(Kind.RELEASE, stage, unit.name, j, "grad"))
    return actions


def state_work(layout: Layout, stage: int) -> list[Action]:
    """What closes a step after the last backward: sync, norm, update, gather."""
    units = [u.name for u in layout.units[stage]]
    actions: list[Action] = []
    if layout.replicas > 1 and not reduces_per_microbatch(layout):
        actions += [Action(Kind.GRAD_SYNC, stage, u) for u in gradient_order(layout, stage)]
    if layout.tied_across and TIED in units:
        actions.append(Action(Kind.TIED_SYNC, stage, TIED))
    actions.append(Action(Kind.GRAD_NORM, stage))
    for unit in units:
        actions.append(Action(Kind.UPDATE_SHARD, stage, unit))
        actions.append(Action(Kind.RELEASE, stage, unit, None, "grad"))
    if layout.replicas > 1 and layout.zero > 0:
        actions += [Action(Kind.PREFETCH_VIEW, stage, u, None, "fwd") for u in units if keeps_view(layout, u)]
    return actions


def _messages(layout: Layout, stage: int, backward: bool) -> dict[str, tuple[Action, ...]]:
    def each(kind: Kind) -> tuple[Action, ...]:
        return tuple(Action(kind, stage, None, j) for j in range(layout.microbatches))

    streams: dict[str, tuple[Action, ...]] = {}
    if stage > 0:
        streams["recv_act"] = each(Kind.RECV_ACT)
        if backward:
            streams["send_grad"] = each(Kind.SEND_GRAD)
    if stage < layout.pipeline - 1:
        streams["send_act"] = each(Kind.SEND_ACT)
        if backward:
            streams["recv_grad"] = each(Kind.RECV_GRAD)
    return streams
