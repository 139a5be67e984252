"""A pass changes when, never what: bitwise equal losses, norms, gradients, weights and moments."""

from __future__ import annotations

from typing import Any

import pytest

from ratrain.program.passes import build
from runtime_matrix import SUBSETS, configuration, covering
from runtime_world import ALL, Result, layout, train

MOST = 6
ROWS = covering(MOST)


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
    for passes in (ALL, SUBSETS[1 + number % (len(SUBSETS) - 2)]):
        changed = train(**row, passes=passes)
        assert_same(changed, none)
        assert_leaves_nothing(changed)
        assert_ran_its_program(changed)
    assert_ran_its_program(none)


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
