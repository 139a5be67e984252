"""What actions cost: recovery by rung, transfers by links, and the simulator's view of both."""

from __future__ import annotations

from typing import Any

import pytest

from ratrain.errors import UserError
from ratrain.machine.collectives import place, seconds_together
from ratrain.machine.platform import load_platform
from ratrain.machine.profile import BlockTime, Communication, Origin, Profile
from ratrain.model.spec import RUNGS
from ratrain.model.tensor_slice import tensor_slice
from ratrain.plan.compute import Compute
from ratrain.plan.costs import Costs
from ratrain.plan.network import Network
from ratrain.plan.plan import uniform_rungs
from ratrain.program.action import Action, Kind
from test_plan_plan import make_plan, tiny_spec

SPEC = tiny_spec()
PLATFORM = load_platform("ethernet-24gb")


def profile(**changes: Any) -> Profile:
    times = [
        BlockTime("m", block, rung, 1, 64, "fp32", 1.0, {"keep": 0.0}.get(rung, 0.9), 2.0)
        for block, rungs in (("embed", ("keep",)), ("layer0", ("keep", "inputs")), ("head", ("keep",)))
        for rung in rungs
    ]
    links = (
        Communication("p2p", 2, ((1.0, 0.001), (10**6 + 1.0, 1.001))),
        Communication("reduce_scatter", 2, ((1.0, 0.002), (2 * 10**6 + 1.0, 1.002))),
    )
    values = {
        "origin": Origin("now", "here", "cpu", 2, 1, "2", 2),
        "models": {"m": SPEC.raw},
        "blocks": tuple(times),
        "optimizer_rate": 1e6,
        "norm_rate": 1e7,
        "runtime_base_memory": 1.0,
        "communications": links,
        "slowdown_under_communication": 1.2,
        "drag_under_compute": 1.5,
    }
    return Profile(**(values | changes))  # type: ignore[arg-type]


def test_recovery_grows_down_the_ladder_and_stays_below_a_forward() -> None:
    for source in (PLATFORM, load_platform("local")):
        layer = Compute(source, "bf16").block(SPEC, "layer0", 1, 64)
        recover = [layer.recover[rung] for rung in RUNGS]
        assert recover[0] == 0 and recover == sorted(recover)
        assert recover[-1] < layer.forward < layer.backward


def test_measured_blocks_are_scaled_by_operations() -> None:
    compute = Compute(profile(), "fp32")
    assert compute.block(SPEC, "layer1", 1, 64).forward == pytest.approx(1.0)
    wide = tiny_spec(hidden_size=128)
    ratio = wide.forward_flops("layer0", 2, 64) / SPEC.forward_flops("layer0", 1, 64)
    scaled = compute.block(wide, "layer0", 2, 64)
    assert scaled.backward == pytest.approx(2.0 * ratio)
    assert scaled.recover["inputs"] == pytest.approx(0.9 * ratio)
    assert scaled.recover["mlp"] == pytest.approx(ratio), "not measured: at most a whole forward"
    with pytest.raises(UserError, match="no bf16 blocks"):
        Compute(profile(), "bf16")


def test_a_shape_between_two_measured_ones_is_a_power_of_its_size() -> None:
    wide, middle = tiny_spec(hidden_size=128), tiny_spec(hidden_size=96)
    sizes = [spec.forward_flops("layer0", 1, 64) for spec in (SPEC, middle, wide)]
    times = [
        BlockTime(name, "layer0", "keep", 1, 64, "fp32", size**0.8, 0.0, 2 * size**0.9)
        for name, size in (("m", sizes[0]), ("w", sizes[2]))
    ]
    compute = Compute(profile(models={"m": SPEC.raw, "w": wide.raw}, blocks=tuple(times)), "fp32")
    found = compute.block(middle, "layer0", 1, 64)
    assert found.forward == pytest.approx(sizes[1] ** 0.8)
    assert found.backward == pytest.approx(2 * sizes[1] ** 0.9)


def test_measured_links() -> None:
    links = Network(profile(), data=4)
    assert links.message(10**6).seconds == pytest.approx(1.001, rel=1e-5)
    assert links.over_replicas("reduce_scatter", 10**6).seconds == pytest.approx(
        0.002 * 3 + 0.75 * 0.5, rel=1e-5
    )


@pytest.mark.parametrize("data", [2, 3, 4, 8])
def test_rings_take_what_the_collective_model_says(data: int) -> None:
    """One stage's replicas alone, against every message placed on actual ranks."""
    size = 8 * 10**6
    placed = place("all_gather", "ring", range(data), size, PLATFORM)
    flow = Network(PLATFORM, data).over_replicas("all_gather", size)
    assert flow.seconds == pytest.approx(seconds_together([placed], PLATFORM))


def test_messages_of_a_node_share_its_uplink() -> None:
    """Replicas 0 and 1 of stage 0 share a node, and so do those of stage 1: both send at once."""
    size = 10**6
    transfers = [place("p2p", "ring", pair, size, PLATFORM) for pair in ((0, 2), (1, 3))]
    assert Network(PLATFORM, 2).message(size).seconds == pytest.approx(seconds_together(transfers, PLATFORM))


def test_every_action_of_a_step_has_a_cost() -> None:
    for zero in (0, 1, 2, 3):
        tied = tiny_spec(tie_word_embeddings=True)
        plan = make_plan(tied, data=2, zero=zero, rungs=uniform_rungs((2, 2), "inputs"), view="bf16")
        costs = Costs(tied, plan, Compute(PLATFORM, "bf16"))
        capacity = costs.ports.capacity
        for _, _, lane in plan.program().distinct():
            for action in (a for actions in lane.values() for a in actions):
                cost = costs(action)
                assert cost.seconds >= 0 and all(port in capacity and load > 0 for port, load in cost.loads)


def test_a_block_costs_what_its_rung_costs_where_the_program_drops_it() -> None:
    """The last stage drops nothing, because backwards follow their forwards; unless they go in groups."""
    times = [
        BlockTime("m", block, rung, 1, 64, "fp32", forward, 0.5, 2.0)
        for block in ("embed", "layer0", "head")
        for rung, forward in (("keep", 1.0), ("inputs", 0.75))
    ]
    compute = Compute(profile(blocks=tuple(times)), "fp32")

    def forward(stage: int, **choices: Any) -> float:
        plan = make_plan(SPEC, data=1, rungs=uniform_rungs((2, 2), "inputs"), **choices)
        block = plan.layout().stages[stage][1 - stage]
        return Costs(SPEC, plan, compute)(Action(Kind.FORWARD, stage, block, 0)).seconds

    assert (forward(0), forward(1)) == (0.75, 1.0)
    assert forward(1, passes=()) == 0.75
    assert forward(1, grouped=8) == 0.75


def test_zero_0_reduces_to_every_replica_and_updates_all() -> None:
    def cost(zero: int, kind: Kind) -> Any:
        plan = make_plan(SPEC, data=2, zero=zero, view="bf16")
        return Costs(SPEC, plan, Compute(PLATFORM, "bf16"))(Action(kind, 0, "layer0"))

    assert cost(0, Kind.GRAD_SYNC).loads[0][1] == pytest.approx(2 * cost(1, Kind.GRAD_SYNC).loads[0][1])
    assert cost(0, Kind.UPDATE_SHARD).seconds == pytest.approx(2 * cost(1, Kind.UPDATE_SHARD).seconds)


def test_tensor_slices_add_up() -> None:
    half = tensor_slice(SPEC, 2)
    whole = sum(p.size for p in SPEC.parameters("layer0") if p.decay)
    assert 2 * sum(p.size for p in half.parameters("layer0") if p.decay) == whole
    with pytest.raises(UserError, match="4 does not divide the model's 2 key-value heads"):
        tensor_slice(SPEC, 4)


def test_mt3000_is_priced_in_fp16() -> None:
    with pytest.raises(UserError, match="fp16 only"):
        Compute(load_platform("mt3000"), "fp32")
