"""Broken programs are refused, each for the right reason: the checker can fail."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from program_strategies import programs
from ratrain.program.action import Action, parse
from ratrain.program.checker import ProgramError, check, require_legal
from ratrain.program.layout import RUNGS, Layout
from ratrain.program.memory import Footprint, peak
from ratrain.program.passes import PASSES, build
from ratrain.program.program import Lane, Program

ALL = tuple(PASSES)
Edit = Callable[[list[Action]], list[Action]]


def layout(**choices: object) -> Layout:
    base = Layout.even(2, 4, replicas=2, microbatches=4).with_(**choices)
    return base.with_(rungs=tuple(tuple("inputs" for _ in blocks) for blocks in base.stages))


def edit(program: Program, stage: int, stream: str, change: Edit, replica: int | None = None) -> Program:
    """`program` with one stream changed, on all replicas of the stage or on one."""
    lane = program.lane(stage)
    changed: Lane = {**lane, stream: tuple(change(list(lane[stream])))}
    lanes = [list(replicas) for replicas in program.lanes]
    lanes[stage] = [changed if replica is None or r == replica else old for r, old in enumerate(lanes[stage])]
    return replace(program, lanes=tuple(tuple(replicas) for replicas in lanes))


def drop(text: str) -> Edit:
    def change(actions: list[Action]) -> list[Action]:
        actions.remove(parse(text))
        return actions

    return change


def swap(first: str, second: str) -> Edit:
    def change(actions: list[Action]) -> list[Action]:
        i, k = actions.index(parse(first)), actions.index(parse(second))
        actions[i], actions[k] = actions[k], actions[i]
        return actions

    return change


def move(text: str, before: str) -> Edit:
    def change(actions: list[Action]) -> list[Action]:
        actions.remove(parse(text))
        actions.insert(actions.index(parse(before)), parse(text))
        return actions

    return change


def repeat(text: str) -> Edit:
    def change(actions: list[Action]) -> list[Action]:
        actions.insert(actions.index(parse(text)), parse(text))
        return actions

    return change


def late(program: Program) -> Program:
    """The update of layer0, and what it frees, after the forwards of the first micro-batch."""
    for text in ("UPDATE_SHARD(s0,layer0,lag1)", "RELEASE(s0,layer0,grad,lag1)"):
        program = edit(program, 0, "compute", move(text, "FORWARD(s0,embed,m1)"))
    return program


STEADY = build(layout(), "steady", ALL)
BASELINE = build(layout(), "steady", ())
SYNCED = build(layout(), "steady", ("layerwise_sync",))
ZERO2 = build(layout(zero=2), "steady", ALL)
ZERO3 = build(layout(zero=3), "steady", ALL)
TIED = build(layout(tied=True), "steady", ALL)
GROUPED = build(layout(grouped=2), "steady", ALL)

MUTANTS: dict[str, tuple[Program, str, str, str]] = {
    # name: (mutant, rule, what the message names, a word of the reason)
    "dropped sync": (
        edit(STEADY, 1, "sync", drop("GRAD_SYNC(s1,layer3)")),
        "missing",
        "GRAD_SYNC(s1,layer3)",
        "drift apart",
    ),
    "dropped sync of one micro-batch": (
        edit(ZERO2, 1, "sync", drop("GRAD_SYNC(s1,layer3,m2)")),
        "missing",
        "GRAD_SYNC(s1,layer3,m2)",
        "drift apart",
    ),
    "dropped tied sync": (
        edit(TIED, 0, "sync", drop("TIED_SYNC(s0,tied)")),
        "missing",
        "TIED_SYNC(s0,tied)",
        "differ between first and last",
    ),
    "dropped gather": (
        edit(STEADY, 0, "prefetch", drop("PREFETCH_VIEW(s0,layer0,fwd,lag1)")),
        "missing",
        "PREFETCH_VIEW(s0,layer0,fwd,lag1)",
        "read before it is ready",
    ),
    "dropped update": (
        edit(STEADY, 0, "compute", drop("UPDATE_SHARD(s0,layer0,lag1)")),
        "missing",
        "UPDATE_SHARD(s0,layer0,lag1)",
        "never be updated",
    ),
    "swapped collectives on one replica": (
        edit(STEADY, 1, "sync", swap("GRAD_SYNC(s1,layer3)", "GRAD_SYNC(s1,layer2)"), replica=1),
        "group order",
        "GRAD_SYNC(s1,layer3)",
        "on stage 1 replica 1 but",
    ),
    "swapped gathers on one replica": (
        edit(
            STEADY,
            0,
            "prefetch",
            swap("PREFETCH_VIEW(s0,layer0,fwd,lag1)", "PREFETCH_VIEW(s0,layer1,fwd,lag1)"),
            replica=1,
        ),
        "group order",
        "PREFETCH_VIEW(s0,layer0,fwd,lag1)",
        "on stage 0 replica 1 but",
    ),
    "swapped sends": (
        edit(STEADY, 0, "send_act", swap("SEND_ACT(s0,m1)", "SEND_ACT(s0,m2)")),
        "group order",
        "RECV_ACT(s1,m1)",
        "SEND_ACT(s0,m2)",
    ),
    "swapped sends and receives": (
        edit(
            edit(STEADY, 0, "send_act", swap("SEND_ACT(s0,m0)", "SEND_ACT(s0,m3)")),
            1,
            "recv_act",
            swap("RECV_ACT(s1,m0)", "RECV_ACT(s1,m3)"),
        ),
        "deadlock",
        "SEND_ACT(s0,m0)",
        "can never start",
    ),
    "missing release of activations": (
        edit(STEADY, 0, "compute", drop("RELEASE(s0,layer1,m2,act)")),
        "missing",
        "RELEASE(s0,layer1,m2,act)",
        "live for ever",
    ),
    "missing release of a gathered view": (
        edit(ZERO3, 0, "compute", drop("RELEASE(s0,layer1,m2,view.bwd)")),
        "missing",
        "RELEASE(s0,layer1,m2,view.bwd)",
        "live for ever",
    ),
    "double release": (
        edit(STEADY, 0, "compute", repeat("RELEASE(s0,layer1,m2,act)")),
        "surplus",
        "RELEASE(s0,layer1,m2,act)",
        "more than once",
    ),
    "release before its backward": (
        edit(STEADY, 0, "compute", move("RELEASE(s0,layer1,m2,act)", "BACKWARD(s0,layer1,m2)")),
        "order",
        "RELEASE(s0,layer1,m2,act)",
        "stands before BACKWARD(s0,layer1,m2)",
    ),
    "early update, same stream": (
        edit(BASELINE, 1, "compute", move("UPDATE_SHARD(s1,layer3)", "GRAD_SYNC(s1,layer3)")),
        "order",
        "UPDATE_SHARD(s1,layer3)",
        "stands before GRAD_NORM(s1)",
    ),
    "early update, before the backward": (
        edit(
            build(layout(gated=False), "steady", ()),
            1,
            "compute",
            move("UPDATE_SHARD(s1,layer3)", "BACKWARD(s1,layer3,m3)"),
        ),
        "order",
        "UPDATE_SHARD(s1,layer3)",
        "stands before GRAD_SYNC(s1,layer3)",
    ),
    "early update, across streams": (
        edit(SYNCED, 1, "compute", move("UPDATE_SHARD(s1,layer3)", "BACKWARD(s1,layer3,m3)")),
        "deadlock",
        "UPDATE_SHARD(s1,layer3)",
        "can never start",
    ),
    "late update": (late(STEADY), "deadlock", "UPDATE_SHARD(s0,layer0,lag1)", "can never start"),
    "forward before its view": (
        late(build(layout(zero=0), "steady", ALL)),
        "order",
        "FORWARD(s0,layer0,m0)",
        "stands before UPDATE_SHARD(s0,layer0,lag1)",
    ),
    "grouped backward before the block behind it": (
        edit(GROUPED, 1, "compute", swap("BACKWARD(s1,layer3,m3)", "BACKWARD(s1,layer2,m3)")),
        "order",
        "BACKWARD(s1,layer2,m3)",
        "stands before RECOVER(s1,layer2,m3)",
    ),
    "grouped recovery before there is room": (
        edit(
            build(layout(grouped=2, ahead=0), "steady", ALL),
            1,
            "compute",
            move("RECOVER(s1,layer2,m3)", "BACKWARD(s1,layer3,m3)"),
        ),
        "order",
        "RECOVER(s1,layer2,m3)",
        "stands before RELEASE(s1,layer2,m2,act)",
    ),
    "double gradient": (
        edit(STEADY, 1, "compute", repeat("BACKWARD(s1,layer2,m1)")),
        "surplus",
        "BACKWARD(s1,layer2,m1)",
        "contributed more than once",
    ),
    "missing gradient": (
        edit(STEADY, 1, "compute", drop("BACKWARD(s1,layer2,m1)")),
        "missing",
        "BACKWARD(s1,layer2,m1)",
        "not be contributed",
    ),
    "missing recovery": (
        edit(BASELINE, 0, "compute", drop("RECOVER(s0,layer0,m1)")),
        "missing",
        "RECOVER(s0,layer0,m1)",
        "",
    ),
    "one group on two streams": (
        edit(
            edit(STEADY, 1, "sync", drop("GRAD_SYNC(s1,layer2)")),
            1,
            "compute",
            lambda actions: [*actions, parse("GRAD_SYNC(s1,layer2)")],
        ),
        "group",
        "('sync', 1)",
        "two streams",
    ),
    "unknown stream": (
        edit(
            replace(STEADY, lanes=tuple(({**r[0], "aside": ()},) * 2 for r in STEADY.lanes)), 0, "aside", list
        ),
        "stream",
        "aside",
        "unknown",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_refused_for_the_right_reason(name: str) -> None:
    mutant, rule, names, reason = MUTANTS[name]
    with pytest.raises(ProgramError) as caught:
        require_legal(mutant)
    assert {v.rule for v in caught.value.violations} == {rule}
    first = caught.value.violations[0]
    assert names in first.message
    assert reason in first.message


def test_refusal_draws_the_program_and_marks_the_action() -> None:
    with pytest.raises(ProgramError) as caught:
        require_legal(MUTANTS["double gradient"][0])
    assert "[B1]" in str(caught.value)
    assert "marked: BACKWARD(s1,layer2,m1)" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(programs(forms=("first", "steady", "flush", "evaluate")))
def test_no_action_can_be_left_out(program: Program) -> None:
    """Every action is needed: a program without it is refused, wherever it stood."""
    for stage in range(program.layout.pipeline):
        for stream, actions in program.lane(stage).items():
            for i in range(0, len(actions), max(1, len(actions) // 4)):
                kind = actions[i].kind
                mutant = edit(program, stage, stream, lambda listed, i=i: listed[:i] + listed[i + 1 :])
                assert [v.rule for v in check(mutant)] == ["missing"], kind


def footprint(layout: Layout, stage: int) -> Footprint:
    """Sizes without a pattern, so that no two sums agree by accident."""
    kept = {
        (block, rung): (len(RUNGS) - k) * 1000 + 7 * i
        for i, block in enumerate(layout.stages[stage])
        for k, rung in enumerate(RUNGS)
    }
    return Footprint(12345, kept, {block: 111 for block in layout.stages[stage]}, boundary=53)


@settings(max_examples=60, deadline=None)
@given(programs(forms=("first", "steady", "evaluate")))
def test_a_budget_one_byte_short_is_refused(program: Program) -> None:
    footprints = [footprint(program.layout, s) for s in range(program.layout.pipeline)]
    needs = [peak(program, s, f).total for s, f in enumerate(footprints)]
    assert check(program, footprints, max(needs)) == []
    violations = check(program, footprints, max(needs) - 1)
    assert [(v.rule, v.stage) for v in violations] == [
        ("memory", s) for s, need in enumerate(needs) if need == max(needs)
    ]
    assert all(str(max(needs)) in v.message and v.action is not None for v in violations)


def test_memory_grows_by_recovery_ahead_and_not_by_microbatches() -> None:
    """Each further micro-batch ahead costs what recovery rebuilds; more micro-batches cost nothing."""
    sizes: dict[tuple[int, int], int] = {}
    for ahead in (0, 1, 2):
        for microbatches in (8, 32):
            program = build(layout(ahead=ahead, microbatches=microbatches), "steady", ALL)
            sizes[ahead, microbatches] = peak(program, 0, footprint(program.layout, 0)).total
    assert sizes[0, 8] == sizes[0, 32] and sizes[1, 8] == sizes[1, 32]
    assert sizes[0, 8] < sizes[1, 8]
    assert sizes[1, 8] == sizes[2, 8]  # two stages: two micro-batches in flight at most
