"""A non-finite gradient on one rank is a matter of all ranks: fp16 views under a dynamic loss scale."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runtime_world import ALL, Refused, train

FP16: dict[str, Any] = {"view": "fp16", "grad": "fp32", "loss_scale": 64.0, "warmup": 3}
PLANS: dict[str, dict[str, Any]] = {
    "P2": {"layers": (2, 1)},
    "D2-zero0": {"layers": (3,), "data": 2, "zero": 0},
    "D2-zero3": {"layers": (3,), "data": 2, "zero": 3},
    "P2D2-zero1": {"layers": (2, 1), "data": 2, "zero": 1, "clip": 0.5, "rungs": "inputs"},
    "P2D2-zero2": {"layers": (2, 1), "data": 2, "zero": 2, "model": {"tie_word_embeddings": True}},
}


@pytest.mark.parametrize(("name", "passes"), [*((name, ALL) for name in PLANS), ("P2D2-zero1", ())])
def test_bc31_all_ranks_skip(name: str, passes: tuple[str, ...]) -> None:
    plan = FP16 | PLANS[name] | {"passes": passes}
    size = len(plan["layers"]) * plan.get("data", 1)
    one, two = train(**plan, steps=1), train(**plan, steps=2)
    for rank in {0, size - 1}:
        wrecked = train(**plan, steps=2, wreck=([1], rank, math.inf))
        # The second update is skipped: nothing has changed since the first.
        assert all(wrecked.state[n].tobytes() == one.state[n].tobytes() for n in one.state)
        assert [m["skipped"] for m in wrecked.metrics] == [False, True]
        rules = [r["rule"] for r in wrecked.ranks]
        assert all(rule == rules[0] for rule in rules)
        assert rules[0]["applied"] == 1 and rules[0]["loss_scale"] == 32.0
        assert all(r["updates"] == [1] for r in wrecked.ranks)
        # Training goes on where the schedule stood.
        longer = train(**plan, steps=3, wreck=([1], rank, math.inf))
        assert longer.metrics[2]["lr"] == two.metrics[1]["lr"]
        assert [m["skipped"] for m in longer.metrics] == [False, True, False]
        assert longer.losses[2] < math.inf


def test_bc31_overflows_at_the_smallest_scale_end_the_run() -> None:
    plan = FP16 | PLANS["P2"] | {"loss_scale": 2.0}
    with pytest.raises(Refused, match="non-finite gradients in a row") as refusal:
        train(**plan, steps=40, wreck=(range(40), 1, math.nan))
    assert all(cause is not None for cause in refusal.value.causes)


def test_clipping_without_a_scale_skips_too_and_without_a_gate_the_run_ends() -> None:
    plan: dict[str, Any] = {"layers": (2, 1), "data": 2, "zero": 2}
    one = train(**plan, clip=0.5, steps=1)
    wrecked = train(**plan, clip=0.5, steps=2, wreck=([1], 2, math.nan))
    assert all(wrecked.state[n].tobytes() == one.state[n].tobytes() for n in one.state)
    with pytest.raises(Refused, match="non-finite gradient or loss") as refusal:
        train(**plan, clip=0.0, steps=3, wreck=([1], 2, math.nan))
    assert all(cause is not None for cause in refusal.value.causes)


def test_the_loss_scale_changes_no_update() -> None:
    """Powers of two leave every digit as it is, under- and overflow aside: of fp32 views, none."""
    plan: dict[str, Any] = {"layers": (2, 1), "data": 2, "zero": 1, "clip": 1e9}
    scaled, plain = train(**plan, loss_scale=256.0), train(**plan)
    assert scaled.losses == plain.losses
    assert all(scaled.state[n].tobytes() == plain.state[n].tobytes() for n in plain.state)
