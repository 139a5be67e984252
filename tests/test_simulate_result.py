"""What a simulation reports: memory as it lived, accounts, timeline, and how fast it answers."""

import subprocess
import sys
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from program_strategies import layouts, programs
from ratrain.program.action import Action, Kind
from ratrain.program.graph import lower
from ratrain.program.layout import RUNGS, Layout
from ratrain.program.memory import Footprint, live_bytes, peak
from ratrain.program.passes import PASSES, build
from ratrain.program.program import Program
from ratrain.program.timeline import Timeline
from ratrain.simulate.cost import Cost, Network
from ratrain.simulate.result import Simulation
from ratrain.simulate.simulator import simulate
from ratrain.simulate.tables import KINDS

ALL = tuple(PASSES)
WORKS = (Kind.FORWARD, Kind.BACKWARD, Kind.RECOVER)


def footprints(layout: Layout) -> list[Footprint]:
    """Sizes without a pattern, so that no two sums agree by accident."""
    return [
        Footprint(
            1000 * (s + 1),
            {
                (block, rung): (len(RUNGS) - k) * 1000 + 7 * i
                for i, block in enumerate(blocks)
                for k, rung in enumerate(RUNGS)
            },
            {block: 111 + i for i, block in enumerate(blocks)},
            boundary=53,
        )
        for s, blocks in enumerate(layout.stages)
    ]


def costs(seed: int) -> dict[Kind, float]:
    return {kind: ((seed * 31 + i * 17) % 13 + 1) / 8 for i, kind in enumerate(KINDS)}


def forecast(program: Program, seed: int = 5) -> Simulation:
    seconds = costs(seed)

    def cost(action: Action) -> Cost:
        return Cost(seconds[action.kind])

    return simulate(program, cost, Network({}), footprints=footprints(program.layout))


@settings(max_examples=40, deadline=None)
@given(layouts(), st.sampled_from(["first", "steady"]), st.integers(0, 99))
def test_without_floats_memory_is_what_the_checker_counts(layout: Layout, form: str, seed: int) -> None:
    program = build(layout, form, ())
    found = forecast(program, seed)
    for stage, footprint in enumerate(footprints(layout)):
        assert found.peak[stage] == peak(program, stage, footprint).total
        counted = [
            footprint.constant + most
            for action, most in live_bytes(program, stage, footprint)
            if action.kind in WORKS
        ]
        compute = program.lane(stage)["compute"]
        shown = [a for a in compute if a.kind in WORKS or (a.kind, a.phase) == (Kind.RELEASE, "act")]
        lived = found.live[stage].bytes[1:].tolist()  # the first entry is the step's beginning
        assert [most for a, most in zip(shown, lived, strict=True) if a.kind in WORKS] == counted


@settings(max_examples=80, deadline=None)
@given(programs(forms=("first", "steady")), st.integers(0, 99))
def test_with_floats_memory_stays_within_the_bound(program: Program, seed: int) -> None:
    found = forecast(program, seed)
    for stage, footprint in enumerate(footprints(program.layout)):
        assert found.peak[stage] <= peak(program, stage, footprint).total
        assert found.live[stage].bytes[-1] == footprint.constant  # every activation was freed


@settings(max_examples=60, deadline=None)
@given(programs(forms=("first", "steady")), st.integers(0, 99))
def test_accounts_add_up(program: Program, seed: int) -> None:
    found = forecast(program, seed)
    assert len(found.accounts) == program.layout.pipeline
    for booked, busy in zip(found.accounts, found.busy):
        assert sum(booked.causes.values()) == pytest.approx(booked.exposed)
        assert booked.step - busy[Kind.FORWARD] - busy[Kind.BACKWARD] == pytest.approx(booked.exposed) or (
            program.form == "first"  # its window opens before the first FORWARD of later stages
        )
        assert 0 <= booked.tail <= booked.exposed + 1e-9
        if program.form == "steady":
            assert "idle" not in booked.causes  # every standstill names what it waits for
    if program.form == "steady":
        assert found.step == pytest.approx(max(a.step for a in found.accounts))
        assert 0 <= found.bubble < 1
    assert found.exposed_mean == pytest.approx(sum(found.causes.values()))


def test_passes_hide_what_the_baseline_exposes() -> None:
    """Two replicas with a slow network: layer-wise work must beat the same work at the end of the step."""
    layout = Layout.even(2, 8, replicas=2, microbatches=8)
    layout = layout.with_(rungs=tuple(tuple("inputs" for _ in blocks) for blocks in layout.stages))

    def cost(action: Action) -> Cost:
        seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.RECOVER: 1.0, Kind.UPDATE_SHARD: 0.5}
        return Cost(seconds.get(action.kind, 1.0 if action.kind in SLOW else 0.0))

    SLOW = (Kind.GRAD_SYNC, Kind.PREFETCH_VIEW)
    found = {p: simulate(build(layout, "steady", p), cost, Network({})) for p in ((), ALL)}
    assert found[()].causes["GRAD_SYNC"] == pytest.approx(5.0)  # each stage has five units
    assert found[()].causes["RECOVER"] == pytest.approx(8 * 5.0)
    assert found[ALL].step < found[()].step
    assert found[ALL].tail < found[()].tail
    assert found[ALL].causes.get("GRAD_SYNC", 0.0) == 0
    # The last stage drops nothing and the first one recovers while it waits.
    assert found[ALL].causes["RECOVER"] < 0.6 * found[()].causes["RECOVER"]


def test_timeline_is_the_executors_type() -> None:
    layout = Layout.even(2, 2, replicas=2, microbatches=2)
    found = forecast(build(layout))
    timeline = found.timeline
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert timeline.source == "simulated"
    assert {row.rank for row in timeline.rows} == {0, 2}  # the first replica of each stage
    assert min(row.start for row in timeline.rows) == 0
    step = [row for row in timeline.rows if row.step == 1]
    assert sorted(str(row.action) for row in step) == sorted(str(a) for a in found.graph.actions)
    for rank in (0, 2):
        compute = [row for row in timeline.rows if (row.rank, row.stream) == (rank, "compute")]
        for before, after in pairwise(compute):
            assert before.end <= after.start
            if after.start > before.end:
                assert after.waited_for is not None
    firsts = [r for r in timeline.rows if (r.rank, r.action) == (0, Action(Kind.FORWARD, 0, "embed", 0))]
    assert firsts[1].start - firsts[0].start == pytest.approx(found.accounts[0].step)


def test_other_forms_run_once() -> None:
    layout = Layout.even(2, 2, replicas=2, microbatches=2)
    flush = forecast(build(layout, "flush"))
    assert len(flush.start) == 1
    assert flush.accounts == ()
    assert flush.step > 0
    evaluation = forecast(build(layout, "evaluate"))
    assert evaluation.step > 0
    assert (evaluation.end >= 0).all()


def test_a_large_step_takes_half_a_second_of_cpu() -> None:
    layout = Layout.even(16, 64, replicas=4, microbatches=256)
    layout = layout.with_(rungs=tuple(tuple("inputs" for _ in blocks) for blocks in layout.stages))
    program = build(layout)
    graph = lower(program)
    seconds = costs(5)

    def cost(action: Action) -> Cost:
        if action.kind in (Kind.SEND_ACT, Kind.SEND_GRAD):
            return Cost(0.01, ((("out", action.stage), 1.0),))
        return Cost(seconds[action.kind])

    network = Network({("out", s): 1.0 for s in range(16)}, slowdown=1.1)
    simulate(program, cost, network, graph=graph)  # compiles
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        assert simulate(program, cost, network, graph=graph).step > 0
        best = min(best, time.process_time() - start)
    assert best < 0.5


def test_importing_the_simulator_does_not_load_numba() -> None:
    script = (
        "import sys, ratrain.simulate.simulator, ratrain.simulate.bound; sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
