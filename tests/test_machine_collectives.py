"""The collective cost model against closed forms."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.machine.collectives import Port, collective, place, seconds_together
from ratrain.machine.platform import Link, Platform, load_platform

LINK = Link(latency=1e-5, bandwidth=1e9)
ALGORITHMS = ("ring", "tree", "pairwise")
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")

kinds = st.sampled_from(COLLECTIVES)
algorithms = st.sampled_from(ALGORITHMS)
sizes = st.floats(1.0, 1e10)
groups = st.integers(1, 64)


@pytest.fixture(scope="module")
def platform() -> Platform:
    return load_platform("a100-8x")


@pytest.mark.parametrize(
    ("kind", "algorithm", "n", "steps", "share"),
    [
        ("all_reduce", "ring", 4, 6, 1.5),
        ("reduce_scatter", "pairwise", 4, 3, 0.75),
        ("all_gather", "tree", 8, 3, 7 / 8),
        ("all_reduce", "tree", 5, 6, 1.6),
        ("p2p", "ring", 2, 1, 1.0),
        ("all_reduce", "ring", 1, 0, 0.0),
    ],
)
def test_closed_forms(kind: str, algorithm: str, n: int, steps: int, share: float) -> None:
    cost = collective(kind, algorithm, n, 1e6, LINK)  # type: ignore[arg-type]
    assert (cost.steps, cost.bytes_per_member) == (steps, pytest.approx(share * 1e6))
    assert cost.alpha_s == pytest.approx(steps * 1e-5)
    assert cost.seconds_alone == pytest.approx(steps * 1e-5 + share * 1e-3)


@given(kinds, algorithms, groups, sizes, st.floats(1.0, 4.0))
def test_more_bytes_members_or_latency_never_cost_less(
    kind: str, algorithm: str, n: int, size: float, more: float
) -> None:
    cost = collective(kind, algorithm, n, size, LINK)  # type: ignore[arg-type]
    slower = Link(LINK.latency * more, LINK.bandwidth / more)
    assert collective(kind, algorithm, n, size * more, LINK).seconds_alone >= cost.seconds_alone  # type: ignore[arg-type]
    assert collective(kind, algorithm, n + 1, size, LINK).seconds_alone >= cost.seconds_alone  # type: ignore[arg-type]
    assert collective(kind, algorithm, n, size, slower).seconds_alone >= cost.seconds_alone  # type: ignore[arg-type]


@given(algorithms, groups, sizes)
def test_all_reduce_is_reduce_scatter_and_all_gather(algorithm: str, n: int, size: float) -> None:
    halves = [collective(kind, algorithm, n, size, LINK) for kind in COLLECTIVES[:2]]  # type: ignore[arg-type]
    whole = collective("all_reduce", algorithm, n, size, LINK)  # type: ignore[arg-type]
    assert whole.seconds_alone == pytest.approx(sum(half.seconds_alone for half in halves))


@settings(max_examples=50)
@given(kinds, algorithms, st.integers(1, 8), sizes)
def test_within_a_node_placed_equals_flat(kind: str, algorithm: str, n: int, size: float) -> None:
    machine = load_platform("a100-8x")
    flat = collective(kind, algorithm, n, size, machine.link("within_node"))  # type: ignore[arg-type]
    placed = place(kind, algorithm, range(n), size, machine)  # type: ignore[arg-type]
    assert seconds_together([placed], machine) == pytest.approx(flat.seconds_alone)


@settings(max_examples=50)
@given(kinds, algorithms, st.integers(2, 24), sizes)
def test_what_is_sent_is_received_and_adds_up(kind: str, algorithm: str, n: int, size: float) -> None:
    machine = load_platform("a100-8x")
    totals: defaultdict[str, float] = defaultdict(float)
    for port, load in place(kind, algorithm, range(n), size, machine).loads.items():  # type: ignore[arg-type]
        totals[port.direction] += load
    cost = collective(kind, algorithm, n, size, LINK)  # type: ignore[arg-type]
    assert totals["out"] == pytest.approx(n * cost.bytes_per_member)
    assert totals["in"] == pytest.approx(totals["out"])


def test_ring_crosses_each_uplink_once_and_pairwise_crosses_for_every_outsider(platform: Platform) -> None:
    uplink = Port("between_nodes", 0, "out")
    ring = place("reduce_scatter", "ring", range(16), 16.0, platform)
    pairwise = place("reduce_scatter", "pairwise", range(16), 16.0, platform)
    assert ring.loads[uplink] == pytest.approx(15.0)
    assert pairwise.loads[uplink] == pytest.approx(
        8 * 8
    )  # 8 members of the node, 8 owners outside, 1 byte each
    assert ring.alpha_s == pytest.approx(15 * platform.between_nodes.latency)


def test_concurrent_transfers_share_the_uplink(platform: Platform) -> None:
    groups = [place("all_reduce", "ring", (rank, rank + 8), 1e9, platform) for rank in range(8)]
    alone = seconds_together(groups[:1], platform)
    alpha = groups[0].alpha_s
    assert seconds_together(groups, platform) - alpha == pytest.approx(8 * (alone - alpha))
    assert math.isclose(alone - alpha, 1e9 / platform.between_nodes.total_bandwidth)
    apart = [place("p2p", "ring", pair, 1e9, platform) for pair in ((0, 1), (2, 3))]
    assert seconds_together(apart, platform) == pytest.approx(seconds_together(apart[:1], platform))


def test_half_duplex_takes_twice_as_long(platform: Platform) -> None:
    half = replace(LINK, latency=0.0, duplex="half")
    full = replace(LINK, latency=0.0)
    for kind in COLLECTIVES:
        slow, fast = (collective(kind, "ring", 4, 1e6, link).seconds_alone for link in (half, full))  # type: ignore[arg-type]
        assert slow == pytest.approx(2 * fast)
    machine = replace(platform, within_node=half)
    there_and_back = [place("p2p", "ring", pair, 1e6, machine) for pair in ((0, 1), (1, 0))]
    assert seconds_together(there_and_back, machine) == pytest.approx(2e-3)


def test_bad_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="p2p is between 2"):
        collective("p2p", "ring", 3, 1.0, LINK)
    with pytest.raises(ValueError, match="at least 1"):
        collective("all_reduce", "ring", 0, 1.0, LINK)
