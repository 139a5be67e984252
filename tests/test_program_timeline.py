"""Accounts of hand-made timelines, and the plain form of a timeline."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.program.action import parse
from ratrain.program.timeline import Row, Timeline, account


def row(text: str, start: float, end: float, waited: str | None = None, step: int = 0) -> Row:
    return Row(0, step, "compute", parse(text), start, end, parse(waited) if waited else None)


NEXT = row("FORWARD(s0,embed,m0)", 10.0, 11.0, "PREFETCH_VIEW(s0,embed,fwd,lag1)", 1)


def test_a_busy_step_exposes_nothing() -> None:
    rows = [row("FORWARD(s0,embed,m0)", 0, 4), row("BACKWARD(s0,embed,m0)", 4, 10)]
    booked = account(rows, NEXT)
    assert booked is not None
    assert (booked.step, booked.exposed, booked.tail, booked.causes) == (10, 0, 0, {})


def test_each_piece_is_booked_on_what_was_awaited_or_run() -> None:
    rows = [
        row("FORWARD(s0,embed,m0)", 1, 2),
        row("RECOVER(s0,embed,m0)", 2.5, 3, None),  # idle 0.5, recovery 0.5
        row("BACKWARD(s0,embed,m0)", 5, 7, "RECV_GRAD(s0,m0)"),  # waits 2 for the gradient
        row("RELEASE(s0,embed,m0,act)", 7, 7),
        row("UPDATE_SHARD(s0,embed,lag1)", 8, 9, "GRAD_NORM(s0)"),  # tail: waits 1, updates 1, gathers 1
    ]
    booked = account(rows, NEXT)
    assert booked is not None
    assert booked.step == 9
    assert booked.exposed == 6
    assert booked.tail == 3
    assert booked.causes == {
        "idle": 0.5,
        "RECOVER": 0.5,
        "RECV_GRAD": 2.0,
        "GRAD_NORM": 1.0,
        "UPDATE_SHARD": 1.0,
        "PREFETCH_VIEW": 1.0,
    }


def test_waiting_for_the_first_activation_is_no_tail() -> None:
    rows = [row("FORWARD(s1,layer0,m0)", 0, 1), row("BACKWARD(s1,layer0,m0)", 1, 3)]
    booked = account(rows, row("FORWARD(s1,layer0,m0)", 5, 6, "RECV_ACT(s1,m0)", 1))
    assert booked is not None
    assert (booked.exposed, booked.tail, booked.causes) == (2, 0, {"RECV_ACT": 2})


def test_deferred_work_before_the_first_forward_belongs_to_the_step_before() -> None:
    rows = [
        row("UPDATE_SHARD(s0,embed,lag1)", 0, 3),
        row("FORWARD(s0,embed,m0)", 3, 4),
        row("BACKWARD(s0,embed,m0)", 4, 6),
    ]
    booked = account(rows, None)
    assert booked is not None
    assert (booked.step, booked.exposed) == (3, 0)


def test_without_a_forward_there_is_no_account() -> None:
    assert account([row("UPDATE_SHARD(s0,embed,lag1)", 0, 1)], None) is None
    assert account([], None) is None


actions = st.sampled_from(
    [parse("FORWARD(s0,embed,m0)"), parse("RELEASE(s3,layer12,m7,view.bwd)"), parse("GRAD_NORM(s1)")]
)
times = st.floats(0, 1e6)
rows_of = st.builds(
    Row, st.integers(0, 9), st.integers(0, 9), st.just("sync"), actions, times, times, st.none() | actions
)


@given(st.lists(rows_of, max_size=8), st.dictionaries(st.integers(0, 9), times, max_size=3))
def test_json_round_trip(rows: list[Row], offsets: dict[int, float]) -> None:
    timeline = Timeline(rows, offsets, "simulated")
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 99"):
        Timeline.from_json({**Timeline().to_json(), "version": 99})


def test_causes_add_up_to_the_exposed_time() -> None:
    rows = [
        row("FORWARD(s0,embed,m0)", 0.25, 1.5),
        row("RECOVER(s0,embed,m0)", 1.75, 2.5),
        row("BACKWARD(s0,embed,m0)", 3, 7.5, "RECV_GRAD(s0,m0)"),
    ]
    booked = account(rows, NEXT)
    assert booked is not None
    assert sum(booked.causes.values()) == pytest.approx(booked.exposed)
