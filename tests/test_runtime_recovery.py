"""Recovery rebuilds exactly what was dropped, and memory in flight is what the program says."""

from __future__ import annotations

from typing import Any

import pytest

from ratrain.program.memory import in_flight
from ratrain.program.passes import build
from runtime_matrix import RECOVERIES
from runtime_world import ALL, call, layout, train

DROPOUT = {"attention_dropout": 0.1}


@pytest.mark.parametrize("layers", [(3,), (2, 1)])
@pytest.mark.parametrize("view", ["fp32", "bf16"])
def test_bc10_recovery_draws_the_same_masks(layers: tuple[int, ...], view: str) -> None:
    plan: dict[str, Any] = {"layers": layers, "microbatches": 3, "view": view, "clip": 0.5, "steps": 2}
    # Nothing elided, so that the last stage recovers too.
    kept = train(**plan, model=DROPOUT, rungs="keep", elide=False)
    for rungs in RECOVERIES[1:]:
        for ahead, passes in ((0, ALL), (2, ALL)):
            found = train(**plan, model=DROPOUT, rungs=rungs, ahead=ahead, passes=passes, elide=False)
            assert found.meaning() == kept.meaning(), (rungs, ahead, passes)
    assert train(**plan, rungs="keep").losses != kept.losses


def test_masks_depend_on_the_micro_batch_of_the_global_order_only() -> None:
    common: dict[str, Any] = {"model": DROPOUT, "steps": 2, "view": "fp64", "eval_every": 2}
    alone = train(**common, layers=(3,), microbatches=4)
    plans: list[dict[str, Any]] = [
        {"layers": (2, 1), "microbatches": 4, "rungs": "mixed"},
        {"layers": (3,), "data": 4, "zero": 3, "microbatches": 1},
        {"layers": (1, 2), "data": 2, "zero": 2, "microbatches": 2, "rungs": "inputs"},
    ]
    for plan in plans:
        found = train(**common, **plan)
        assert found.losses == pytest.approx(alone.losses, rel=1e-10)
        assert found.norms == pytest.approx(alone.norms, rel=1e-9)
        assert found.evaluations == pytest.approx(alone.evaluations, rel=1e-8)


def test_bc30_angles_stay_exact_in_a_bf16_run(tmp_path: Any) -> None:
    worst = call("runtime_plain:rotary_error", folder=str(tmp_path))
    assert worst["before"] < 0.004
    assert worst["after"] == worst["before"]


@pytest.mark.parametrize(
    ("microbatches", "expected"), [(2, (2, 2, 2, 1)), (8, (4, 3, 2, 1)), (32, (4, 3, 2, 1))]
)
def test_bc36_micro_batches_in_flight(microbatches: int, expected: tuple[int, ...]) -> None:
    for rungs, passes in (("keep", ALL), ("inputs", ALL), ("inputs", ())):
        found = train(
            layers=(1, 1, 1, 0), microbatches=microbatches, micro_batch=1, rungs=rungs, passes=passes, steps=2
        )
        assert tuple(rank["in_flight"] for rank in found.ranks) == expected
        program = build(layout(found.config), "steady", passes)
        assert tuple(in_flight(program, stage) for stage in range(4)) == expected


def test_bc36_recovered_blocks_stay_within_the_bound() -> None:
    """Besides the micro-batch in backward at most `ahead` hold recovered blocks."""
    for ahead in (0, 1, 2):
        found = train(layers=(1, 1, 1, 0), microbatches=8, micro_batch=1, rungs="inputs", ahead=ahead)
        for rank in found.ranks:
            assert rank["recovered"] <= ahead + 1
        if ahead == 0:
            assert found.ranks[0]["recovered"] == 1
