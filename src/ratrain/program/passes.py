"""Lifecycle passes, each `Program -> Program` and switchable by name.

A pass changes when, never what is summed with what in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ratrain.program.action import Action, Kind
from ratrain.program.collector import uncollected
from ratrain.program.layout import Layout
from ratrain.program.program import Lane, Program
from ratrain.program.schedule import compute_order, one_f_one_b, state_work, train_compute


def grouped_ends(program: Program) -> Program:
    """The first k forwards and the last k backwards of a stage run block by block, k being `layout.grouped`.

    A unit's gather then has k forwards of the block before it to hide under, its reduction k backwards of the
    blocks after it, for k micro-batches' activations. Each unit still adds up micro-batches in their order.
    The first pass: what the others move is still in the baseline's place.
    """
    layout = program.layout
    grouped = min(layout.grouped, layout.microbatches)
    if grouped == 1 or program.form in ("flush", "evaluate"):
        return program
    lanes: dict[int, Lane] = {
        stage: {**program.lane(stage), "compute": train_compute(layout, stage, grouped)}
        for stage in range(layout.pipeline)
    }
    return program.map_lanes(lanes, grouped=grouped)


def layerwise_sync(program: Program) -> Program:
    """Reductions leave the compute stream: each unit is synchronised as soon as its gradient is final."""
    moved = {Kind.GRAD_SYNC, Kind.TIED_SYNC, Kind.GRAD_NORM}
    if program.form in ("flush", "evaluate"):
        return program

    def belongs(action: Action) -> bool:
        freed = action.kind is Kind.RELEASE and action.phase == "grad" and action.microbatch is not None
        return action.kind in moved or freed

    return _move(program, "sync", belongs)


def update_prefetch(program: Program) -> Program:
    """Updates and gathers of a step run in the next one, in forward order, under its forwards (lag 1).

    Under ZeRO-3 the per-micro-batch gathers leave the compute stream as well.
    """
    layout = program.layout
    lanes: dict[int, Lane] = {}
    for stage in range(layout.pipeline):
        lane = program.lane(stage)
        kept = [a for a in lane["compute"] if not _closes_step(a)]
        gathers = [a for a in kept if a.kind is Kind.PREFETCH_VIEW]
        compute = [a for a in kept if a.kind is not Kind.PREFETCH_VIEW]
        if program.form in ("steady", "flush"):
            late = [a for a in state_work(layout, stage) if _closes_step(a)]
            compute = _weave(layout, stage, late, compute)
            views = [a._replace(lag=1) for a in late if a.kind is Kind.PREFETCH_VIEW]
            gathers = _merge_gathers(layout, stage, views, gathers)
        lanes[stage] = {**lane, "compute": tuple(compute), "prefetch": tuple(gathers)}
    floating = program.floating | {Kind.UPDATE_SHARD}
    return program.map_lanes(lanes, floating=floating, deferred=True)


def forward_side_recovery(program: Program) -> Program:
    """RECOVER floats into time the stage would otherwise wait, up to `layout.ahead` micro-batches ahead.

    With several tensor ranks it stays where it is: it has their collectives in it, and as each rank waits at other
    moments, two of them could begin collectives in another order and wait for ever.
    Where a micro-batch's backward directly follows its forward nothing is dropped and RECOVER is elided.
    """
    layout = program.layout
    if program.form in ("flush", "evaluate"):
        return program
    elided = set()
    if layout.elide:
        for stage in range(layout.pipeline):
            previous: tuple[Kind, list[int]] | None = None
            for kind, run in compute_order(layout, stage, program.grouped):
                if kind is Kind.BACKWARD and len(run) == 1 and previous == (Kind.FORWARD, list(run)):
                    elided.add((stage, run[0]))
                previous = (kind, list(run))
    lanes: dict[int, Lane] = {}
    for stage in {s for s, _ in elided}:
        lane = program.lane(stage)
        compute = tuple(
            a for a in lane["compute"] if not (a.kind is Kind.RECOVER and (stage, a.microbatch) in elided)
        )
        lanes[stage] = {**lane, "compute": compute}
    return program.map_lanes(
        lanes,
        floating=program.floating | ({Kind.RECOVER} if layout.tensor == 1 else set()),
        ahead=layout.ahead,
        elided=frozenset(elided),
    )


PASSES: dict[str, Callable[[Program], Program]] = {
    "grouped_ends": grouped_ends,
    "layerwise_sync": layerwise_sync,
    "update_prefetch": update_prefetch,
    "forward_side_recovery": forward_side_recovery,
}
"""All passes in the order in which they are applied."""


@uncollected
def build(layout: Layout, form: str = "steady", passes: Iterable[str] = tuple(PASSES)) -> Program:
    """The program of `layout` with the named passes applied in the order of PASSES.

    Raises ValueError for an unknown pass.
    """
    wanted = set(passes)
    unknown = wanted - PASSES.keys()
    if unknown:
        raise ValueError(f"unknown pass {sorted(unknown)[0]!r}; passes are {', '.join(PASSES)}")
    names = tuple(name for name in PASSES if name in wanted)
    program = one_f_one_b(layout, form)
    for name in names:
        program = PASSES[name](program)
    return program.map_lanes({}, passes=names)


def _move(program: Program, stream: str, belongs: Callable[[Action], bool]) -> Program:
    lanes: dict[int, Lane] = {}
    for stage in range(program.layout.pipeline):
        lane = program.lane(stage)
        stay = tuple(a for a in lane["compute"] if not belongs(a))
        go = tuple(a for a in lane["compute"] if belongs(a))
        lanes[stage] = {**lane, "compute": stay, stream: lane.get(stream, ()) + go}
    return program.map_lanes(lanes)


def _closes_step(action: Action) -> bool:
    """State work that the baseline runs after the last backward and that may wait for the next step."""
    if action.kind is Kind.UPDATE_SHARD:
        return True
    whole = action.microbatch is None
    return whole and (
        action.kind is Kind.PREFETCH_VIEW or (action.kind, action.phase) == (Kind.RELEASE, "grad")
    )


def _merge_gathers(layout: Layout, stage: int, views: list[Action], gathers: list[Action]) -> list[Action]:
    """Step-long views (`views`) among per-micro-batch gathers, by the block that first reads them.

    They mix only under ZeRO-3 with a tied matrix; gathered before their turn they would wait for an update
    that stands behind the very forwards they hold up.
    """
    turn = {u.name: layout.stages[stage].index(u.readers[0]) for u in layout.units[stage]}
    opening = [a for a in gathers if (a.microbatch, a.phase) == (0, "fwd")]  # all before any other gather
    rest = gathers[len(opening) :]
    return sorted(views + opening, key=lambda a: turn[a.unit or ""]) + rest


def _weave(layout: Layout, stage: int, late: list[Action], compute: list[Action]) -> list[Action]:
    """Puts each unit's update one block before the block that first reads it.

    One block early, so that its gather has that block's forward to hide under; a waiting compute stream
    pulls further updates forward by itself.
    """
    work: dict[str, list[Action]] = {}
    for action in late:
        if action.kind is not Kind.PREFETCH_VIEW and action.unit is not None:
            work.setdefault(action.unit, []).append(action._replace(lag=1))
    blocks = layout.stages[stage]
    first_reads = {b: [u.name for u in layout.units[stage] if u.readers[0] == b] for b in blocks}
    before: dict[str, list[Action]] = {block: [] for block in blocks}
    for i, block in enumerate(blocks):
        target = blocks[max(i - 1, 0)]
        for unit in first_reads[block]:
            before[target] += work[unit]
    if not compute:
        return [action for block in blocks for action in before[block]]
    woven: list[Action] = []
    for action in compute:
        if action.kind is Kind.FORWARD and action.microbatch == 0:
            woven += before[action.unit or ""]
        woven.append(action)
    return woven
