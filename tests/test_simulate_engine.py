"""The engine against the slow obvious one, and against closed forms."""

import itertools
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from program_strategies import programs
from ratrain.program.action import Action, Kind
from ratrain.program.graph import lower
from ratrain.program.layout import Layout, place
from ratrain.program.passes import PASSES, build
from ratrain.program.program import Program
from ratrain.simulate.bound import lower_bound
from ratrain.simulate.cost import Cost, Jitter, Network
from ratrain.simulate.simulator import simulate
from simulate_reference import Reference

ALL = tuple(PASSES)
SENDS = (Kind.SEND_ACT, Kind.SEND_GRAD)
RECEIVES = (Kind.RECV_ACT, Kind.RECV_GRAD)
LOCAL = (Kind.FORWARD, Kind.BACKWARD, Kind.RECOVER, Kind.UPDATE_SHARD)


def random_costs(seed: int, ports: bool) -> Callable[[Action], Cost]:
    """Small dyadic durations, so that ties are frequent and sums exact; bytes that give no ties."""

    @cache
    def price(kind: Kind, stage: int, unit: str | None) -> Cost:
        draw = random.Random(f"{seed} {kind} {stage} {unit}")
        if kind in LOCAL:
            return Cost(draw.randint(1, 8) / 4)
        seconds = draw.randint(0, 2) / 4
        if not ports or draw.random() < 0.2:
            return Cost(seconds)
        sides = ("out", "in") if kind not in SENDS + RECEIVES else ("out",) if kind in SENDS else ("in",)
        # Stages in pairs share a port, as devices of one node do.
        return Cost(
            seconds, tuple(((side, stage // 2), draw.uniform(0.1, 2)) for side in sides), draw.randint(1, 3)
        )

    return lambda action: price(action.kind, action.stage, action.unit)


def network(pipeline: int, slowdown: float = 1.0, drag: float = 1.0) -> Network:
    capacity = {(side, s): 1.0 + s / 8 for side in ("out", "in") for s in range(pipeline)}
    return Network(capacity, slowdown, drag)


def agree(program: Program, cost: Callable[[Action], Cost], net: Network) -> None:
    steps = 3
    found = simulate(program, cost, net, steps=steps)
    repeats = steps if program.form == "steady" else 1
    reference = Reference(program, cost, net, repeats)
    for k in range(repeats):
        for node, action in enumerate(found.graph.actions):
            where = (found.graph.lanes[found.graph.lane[node]][0], k, action)
            if found.end[k, node] >= 0:
                assert found.start[k, node] == pytest.approx(float(reference.start[where]), rel=1e-9), where
                assert found.end[k, node] == pytest.approx(float(reference.end[where]), rel=1e-9), where
            else:
                assert k == steps - 1


@settings(max_examples=200, deadline=None)
@given(programs(max_pipeline=4, max_layers=2, max_microbatches=5), st.integers(0, 10**6))
def test_engine_equals_the_reference(program: Program, seed: int) -> None:
    agree(program, random_costs(seed, ports=False), network(4))


@settings(max_examples=150, deadline=None)
@given(
    programs(max_pipeline=4, max_layers=2, max_microbatches=4),
    st.integers(0, 10**6),
    st.sampled_from([1.0, 1.25]),
    st.sampled_from([1.0, 1.5]),
)
def test_engine_equals_the_reference_where_links_are_shared(
    program: Program, seed: int, slowdown: float, drag: float
) -> None:
    agree(program, random_costs(seed, ports=True), network(4, slowdown, drag))


def flat(forward: dict[int, float], backward: dict[int, float]) -> Callable[[Action], Cost]:
    """Seconds per stage on its only layer; everything else is free."""

    def cost(action: Action) -> Cost:
        if (action.unit or "").startswith("layer") and action.kind in (Kind.FORWARD, Kind.BACKWARD):
            return Cost((forward if action.kind is Kind.FORWARD else backward)[action.stage])
        return Cost(0.0)

    return cost


@pytest.mark.parametrize("passes", [(), ALL])
@pytest.mark.parametrize("pipeline", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 16])
def test_equal_stages_take_m_plus_p_minus_one(
    pipeline: int, microbatches: int, passes: tuple[str, ...]
) -> None:
    layout = Layout.even(pipeline, pipeline, replicas=2, microbatches=microbatches)
    seconds = dict.fromkeys(range(pipeline), 1.0), dict.fromkeys(range(pipeline), 2.5)
    found = simulate(build(layout, "steady", passes), flat(*seconds), Network({}))
    expected = (microbatches + pipeline - 1) * 3.5
    assert found.step == pytest.approx(expected)
    assert found.bubble == pytest.approx((pipeline - 1) / (microbatches + pipeline - 1))
    assert found.exposed_mean == pytest.approx((pipeline - 1) * 3.5)
    assert lower_bound(layout, flat(*seconds), Network({})) == pytest.approx(expected)


def longest_path(forward: dict[int, float], backward: dict[int, float], rounds: int) -> float:
    """Makespan of 1F1B by recursion over its order: an action follows its stage's last and its neighbour's."""
    last = len(forward) - 1
    order: list[list[tuple[str, int]]] = []
    for s in range(last + 1):
        warm = min(last - s, rounds)
        listed = [("F", j) for j in range(warm)]
        for j in range(rounds):
            listed += ([("F", warm + j)] if warm + j < rounds else []) + [("B", j)]
        order.append(listed)

    @cache
    def ends(s: int, kind: str, j: int) -> float:
        at = order[s].index((kind, j))
        before = ends(s, *order[s][at - 1]) if at else 0.0
        neighbour = s - 1 if kind == "F" else s + 1
        arrival = ends(neighbour, kind, j) if 0 <= neighbour <= last else 0.0
        return max(before, arrival) + (forward if kind == "F" else backward)[s]

    return ends(0, "B", rounds - 1)


def test_unequal_stages_exhaustively() -> None:
    """Every assignment of 1, 2 or 4 seconds to three stages, for M below, at and above P."""
    for rounds in (1, 2, 3, 5):
        layout = Layout.even(3, 3, microbatches=rounds)
        program = build(layout, "first", ())
        graph = lower(program)
        for speeds in itertools.product((1.0, 2.0, 4.0), repeat=3):
            forward, backward = dict(enumerate(speeds)), {s: 2 * x for s, x in enumerate(speeds)}
            found = simulate(program, flat(forward, backward), Network({}), graph=graph)
            assert found.step == pytest.approx(longest_path(forward, backward, rounds)), (rounds, speeds)


@settings(max_examples=80, deadline=None)
@given(programs(forms=("steady",)), st.integers(0, 10**6), st.booleans())
def test_no_step_beats_its_bound(program: Program, seed: int, ports: bool) -> None:
    cost, net = random_costs(seed, ports), network(5)
    assert simulate(program, cost, net).step >= lower_bound(program.layout, cost, net) * (1 - 1e-9)


@pytest.mark.parametrize("grouped", [1, 2, 6])
def test_a_link_that_is_always_busy_attains_the_bound(grouped: int) -> None:
    """Where sums and views take much longer than what runs beside them, only they and what cannot is left."""
    layout = Layout.even(1, 4, replicas=2, microbatches=6, gated=False, grouped=grouped)
    seconds = flat({0: 1.0}, {0: 2.0})

    def cost(action: Action) -> Cost:
        if action.kind in (Kind.GRAD_SYNC, Kind.PREFETCH_VIEW):
            return Cost(0.0, (("link", 50.0),))
        return seconds(action)

    net = Network({"link": 1.0})
    step, bound = simulate(build(layout, "steady", ALL), cost, net).step, lower_bound(layout, cost, net)
    assert bound * (1 - 1e-9) <= step < 1.02 * bound


def test_one_message_and_two_that_share_a_port() -> None:
    """A transfer alone takes latency + bytes / capacity; two at once on one port take twice the bytes."""
    layout = Layout(place((1, 1)), microbatches=1)
    program = build(layout, "evaluate", ())

    def cost(action: Action) -> Cost:
        if action.kind is Kind.FORWARD:
            return Cost(1.0)
        if action.kind is Kind.SEND_ACT:
            return Cost(0.25, (("link", 10.0),))
        return Cost(0.0)

    found = simulate(program, cost, Network({"link": 4.0}))
    ends = {str(a): found.end[0, n] for n, a in enumerate(found.graph.actions)}
    assert ends["RECV_ACT(s1,m0)"] == pytest.approx(2 + 0.25 + 2.5)

    def both(action: Action) -> Cost:
        return Cost(0.0, (("link", 6.0),)) if action.kind in (*SENDS, Kind.GRAD_SYNC) else cost(action)

    layout = Layout(place((1, 1)), replicas=2, microbatches=1, gated=False)
    # Stage 1 reduces its head while its only gradient leaves: 6 bytes each on one port of 4 bytes/s.
    found = simulate(build(layout, "first", ALL), both, Network({"link": 4.0}))
    spans = {
        str(a): (found.start[0, n], found.end[0, n])
        for n, a in enumerate(found.graph.actions)
        if a.kind in (Kind.SEND_GRAD, Kind.GRAD_SYNC)
    }
    begin, end = spans["SEND_GRAD(s1,m0)"]
    assert begin == spans["GRAD_SYNC(s1,head)"][0]
    assert end - begin == pytest.approx(2 * 6 / 4)


def test_compute_slows_down_while_bytes_flow() -> None:
    layout = Layout(place((1, 1)), microbatches=2)

    def cost(action: Action) -> Cost:
        if action.kind is Kind.FORWARD:
            return Cost(1.0 if action.unit == "layer0" else 0.0)
        return Cost(0.0, (("link", 0.5),)) if action.kind is Kind.SEND_ACT else Cost(0.0)

    found = simulate(build(layout, "evaluate", ()), cost, Network({"link": 1.0}, slowdown=2.0))
    ends = {str(a): found.end[0, n] for n, a in enumerate(found.graph.actions)}
    assert ends["FORWARD(s0,layer0,m0)"] == 1.0
    assert ends["FORWARD(s0,layer0,m1)"] == pytest.approx(1.0 + 0.5 + 0.75)  # half pace for half a second


def test_jitter_is_seeded() -> None:
    layout = Layout.even(2, 4, microbatches=4)
    program, cost = build(layout), random_costs(3, ports=False)
    times = [simulate(program, cost, network(2), jitter=Jitter(seed, 0.1)).step for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
    assert (
        simulate(program, cost, network(2), jitter=Jitter(1, 0.0)).step
        == simulate(program, cost, network(2)).step
    )


def test_what_cannot_be_simulated_is_refused() -> None:
    program = build(Layout.even(2, 2))
    with pytest.raises(ValueError, match="no such capacity"):
        simulate(program, lambda a: Cost(1.0, ((("nowhere"), 1.0),)), Network({}))
    with pytest.raises(ValueError, match="costs -1"):
        simulate(program, lambda a: Cost(-1.0), Network({}))
    with pytest.raises(ValueError, match="at least 2 steps"):
        simulate(program, lambda a: Cost(1.0), Network({}), steps=1)
    lane = program.lane(0)
    late = {**lane, "send_act": lane["send_act"][::-1]}
    stuck = build(Layout.even(2, 2, microbatches=4))
    late = {**stuck.lane(0), "send_act": stuck.lane(0)["send_act"][::-1]}
    other = {**stuck.lane(1), "recv_act": stuck.lane(1)["recv_act"][::-1]}
    with pytest.raises(RuntimeError, match="deadlocks"):
        simulate(stuck.map_lanes({0: late, 1: other}), lambda a: Cost(1.0), Network({}))


def test_three_steps_are_enough() -> None:
    """The step time of the second step is that of any later one."""
    layout = Layout.even(4, 9, replicas=2, microbatches=6)
    layout = layout.with_(rungs=tuple(tuple("inputs" for _ in blocks) for blocks in layout.stages))
    for seed in range(5):
        cost = random_costs(seed, ports=True)
        times = [simulate(build(layout), cost, network(4), steps=steps).step for steps in (3, 4, 6)]
        assert np.ptp(times) < 1e-9
