"""Units that come and go never meet in their buffers, in whatever legal order gathers and reductions happen."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from program_strategies import programs
from ratrain.program.action import Action, Kind
from ratrain.program.deps import WINDOW, dependencies
from ratrain.program.program import Program
from ratrain.program.schedule import gradients_in_turn, keeps_view
from ratrain.program.slots import gradient_capacity, gradient_start, view_slots

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=9)


def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two stretches (start, size) share an element."""
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


@given(SIZES)
def test_views_that_follow_each_other_lie_apart(sizes: list[int]) -> None:
    slots = view_slots(sizes, overlapped=True)
    lies = list(zip(slots.starts, sizes))
    assert all(start + size <= slots.capacity for start, size in lies)
    if len(sizes) > 1:
        assert not any(meet(lies[i - 1], lies[i]) for i in range(len(sizes)))


@given(SIZES)
def test_gradients_that_follow_each_other_lie_apart(sizes: list[int]) -> None:
    capacity = gradient_capacity(sizes, overlapped=True)
    opened = [*sizes, *sizes, *sizes]
    lies = [(gradient_start(capacity, size, k), size) for k, size in enumerate(opened)]
    assert all(start >= 0 and start + size <= capacity for start, size in lies)
    assert not any(meet(a, b) for a, b in itertools.pairwise(lies))


def test_even_rings_take_two_units_and_odd_ones_three() -> None:
    assert view_slots([512] * 4, overlapped=True).capacity == 2 * 512
    assert view_slots([512] * 3, overlapped=True).capacity == 3 * 512
    assert view_slots([4096, 512, 512, 512, 512], overlapped=True).capacity == 4096 + 2 * 512
    assert view_slots([4096, 512, 512], overlapped=False).capacity == 4096
    assert gradient_capacity([512, 512, 4096], overlapped=True) == 4096 + 512


@given(programs())
def test_only_neighbours_exist_at_once(program: Program) -> None:
    """What `view_slots` builds on: a gather waits until all but its last neighbour in the ring are released."""
    layout = program.layout
    for stage in range(layout.pipeline):
        ring = [u.name for u in layout.units[stage] if not keeps_view(layout, u.name)]
        rules = dependencies(program, stage)
        order = [a for a in program.lane(stage)["compute"] if (a.phase or "").startswith("view.")]
        for before, after in itertools.pairwise(order):
            if before.unit != after.unit:
                steps = (ring.index(after.unit or "") - ring.index(before.unit or "")) % len(ring)
                assert steps in (1, len(ring) - 1)
        for freed, user in zip(order, order[WINDOW:]):
            assert user.phase is not None
            gather = Action(Kind.PREFETCH_VIEW, stage, user.unit, user.microbatch, user.phase[5:])
            assert freed in [dep.action for dep in rules[gather]]


@given(programs())
def test_gradients_are_opened_in_turn(program: Program) -> None:
    """What `gradient_start` builds on: the order of backwards is the order of the ring."""
    layout = program.layout
    for stage in range(layout.pipeline):
        turn = gradients_in_turn(layout, stage)
        opener = {u.name: u.readers[-1] for u in layout.units[stage]}
        backwards = [a for a in program.lane(stage)["compute"] if a.kind is Kind.BACKWARD]
        opened = [unit for a in backwards for unit in turn if opener[unit] == a.unit]
        if layout.grouped == 1:
            assert opened == list(turn) * layout.microbatches * bool(backwards)
