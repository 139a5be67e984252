"""A pass changes when, never what: bitwise equal losses, norms, gradients, weights and moments."""

from __future__ import annotations

from typing import Any

import pytest

from ratrain.program.passes import build
from runtime_matrix import SEQUENCE, SUBSETS, configuration, covering, processes
from runtime_world import ALL, Result, layout, train

ROWS = [*covering(4), *[row for row in covering(6) if processes(row) == 6][:6]]
DELAYED: dict[str, dict[str, Any]] = {
    "D2-zero1": {"layers": (3,), "data": 2, "zero": 1, "rungs": "inputs"},
    "D2-zero2": {"layers": (3,), "data": 2, "zero": 2, "rungs": "mixed", "clip": 0.5},
    "D2-zero3": {"layers": (3,), "data": 2, "zero": 3, "rungs": "inputs", "clip": 0.5},
    "P2D2-zero1": {"layers": (2, 1), "data": 2, "zero": 1, "rungs": "mixed", "view": "bf16"},
    "P2D2-zero3": {
        "layers": (1, 2),
        "data": 2,
        "zero": 3,
        "rungs": "inputs",
        "ahead": 2,
        "model": {"tie_word_embeddings": True, "attention_dropout": 0.1},
    },
    "P3": {"layers": (1, 1, 1), "microbatches": 4, "rungs": "inputs", "clip": 0.5},
}


@pytest.mark.parametrize(
    "number",
    range(len(ROWS)),
    ids=lambda n: f"{n}-P{len(ROWS[n]['layers'])}D{ROWS[n]['data']}Z{ROWS[n]['zero']}",
)
def test_passes_change_nothing(number: int) -> None:
    row = configuration(ROWS[number])
    none = train(**row, passes=())
    assert len(none.losses) == 3 and len(none.evaluations) == 2
    assert max(none.norms) > row["clip"]
    others = SUBSETS[1:-1]
    for passes in (ALL, others[number // 2 % len(others)])[: 1 + number % 2]:
        changed = train(**row, passes=passes)
        assert_same(changed, none)
        assert_leaves_nothing(changed)
        assert_ran_its_program(changed)
    assert_ran_its_program(none)


GROUPED: dict[str, dict[str, Any]] = {
    "P1D2": {"layers": (3,), "data": 2, "grouped": 2, "clip": 0.5, "rungs": "mixed", "ahead": 0},
    "P2D2": {"layers": (2, 1), "data": 2, "grouped": 2, "clip": 0.5, "rungs": "inputs"},
    "P2D2-all": {"layers": (1, 2), "data": 2, "grouped": 9, "rungs": "keep", "zero": 0},
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_ends_change_nothing(name: str) -> None:
    plan = SEQUENCE | {"microbatches": 4} | GROUPED[name]
    none = train(**plan, passes=())
    for passes in (ALL, ("grouped_ends",)):
        found = train(**plan, passes=passes)
        assert_same(found, none)
        assert_leaves_nothing(found)
        assert_ran_its_program(found)


@pytest.mark.parametrize("name", DELAYED)
def test_bc09_delays_change_nothing(name: str) -> None:
    plan = SEQUENCE | DELAYED[name]
    none = train(**plan, passes=())
    for seed in range(3):
        late = train(**plan, delay=0.05, delay_seed=seed)
        assert_same(late, none)
        assert_leaves_nothing(late)


def test_a_reordered_reduction_is_caught() -> None:
    """What equality would say of a reduction that sums from the last rank to the first. With two replicas
    addition commutes; with four the rounding tells."""
    plan: dict[str, Any] = SEQUENCE | {"layers": (3,), "data": 4, "zero": 1}
    right, wrong = train(**plan), train(**plan, reducer="reversed")
    with pytest.raises(AssertionError, match="norms"):
        assert_same(wrong, right)
    assert wrong.losses[0] == right.losses[0]
    assert wrong.norms == pytest.approx(right.norms, rel=1e-4)


@pytest.mark.parametrize("zero", [0, 3])
def test_traces_differ_as_programs_do(zero: int) -> None:
    plan: dict[str, Any] = SEQUENCE | {
        "layers": (2, 1),
        "data": 2,
        "zero": zero,
        "rungs": "inputs",
        "steps": 4,
    }
    for passes in (s for s in SUBSETS if "grouped_ends" not in s):  # one micro-batch at a time, by default
        found = train(**plan, passes=passes)
        assert_ran_its_program(found)
        streams = {stream for rank in found.ranks for step in rank["steps"] for stream, _ in step["rows"]}
        lagging = {
            a for rank in found.ranks for step in rank["steps"] for _, a in step["rows"] if "lag1" in a
        }
        assert ("sync" in streams) == ("layerwise_sync" in passes)
        assert bool(lagging) == ("update_prefetch" in passes)
        assert ("prefetch" in streams) == ("update_prefetch" in passes and zero > 0)
        recovered = {
            a
            for rank in found.ranks
            for step in rank["steps"]
            for _, a in step["rows"]
            if a.startswith("RECOVER(s1")
        }
        assert bool(recovered) == ("forward_side_recovery" not in passes)  # the last stage elides it


def test_a_recorded_order_that_is_not_the_programs_is_caught() -> None:
    found = train(**SEQUENCE, layers=(2, 1), data=2, zero=2)
    rows = found.ranks[0]["steps"][1]["rows"]
    synced = [i for i, (stream, _) in enumerate(rows) if stream == "sync"]
    rows[synced[0]], rows[synced[1]] = rows[synced[1]], rows[synced[0]]
    with pytest.raises(AssertionError):
        assert_ran_its_program(found)


def assert_same(found: Result, expected: Result) -> None:
    ours, theirs = found.meaning(), expected.meaning()
    different = [name for name in theirs if ours.get(name) != theirs[name]]
    assert not different and ours.keys() == theirs.keys(), different


def assert_leaves_nothing(result: Result) -> None:
    for rank in result.ranks:
        assert rank["leftovers"] and not any(rank["leftovers"])


def assert_ran_its_program(result: Result) -> None:
    """Every stream ran the actions of its program in their order; what floats ran, but when it liked."""
    programs: dict[str, Any] = {}
    for rank in result.ranks:
        for step in rank["steps"]:
            form = step["form"]
            program = programs.setdefault(form, build(layout(result.config), form, result.config["passes"]))
            floats = {kind.value for kind in program.floating}
            for stream, actions in program.lane(rank["stage"], rank["replica"]).items():
                ran = [action for of, action in step["rows"] if of == stream]
                planned = [str(action) for action in actions]
                assert sorted(ran) == sorted(planned)
                assert _fixed(ran, floats) == _fixed(planned, floats)


def _fixed(actions: list[str], floats: set[str]) -> list[str]:
    return [action for action in actions if action.partition("(")[0] not in floats]
