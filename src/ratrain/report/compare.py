"""The forecast subtracted from the measurement, action by action: both call an action by the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratrain.program.action import Action, Kind
from ratrain.report.places import Place
from ratrain.report.steps import Step

Sort = tuple[Kind, str, str | None]
"""Kind, block without its number, phase."""


@dataclass(frozen=True)
class Miss:
    """How far off the forecast was for one sort of work, on the rank where that added up to most.

    action              the one of it there that was furthest off
    place               the rank
    measured, forecast  its durations, seconds
    total               measured minus forecast, summed over that rank's actions of the sort, seconds
    count               how many these are
    """

    action: Action
    place: Place
    measured: float
    forecast: float
    total: float
    count: int


def misses(
    measured: Step, forecast: Step, places: Sequence[Place], forecast_places: Sequence[Place]
) -> list[Miss]:
    """All sorts of work in the step by how far off their forecast durations were, the furthest first.

    A sort is a kind of action on the embedding, the head, the tied matrix or a decoder layer: so three
    entries are three different findings, not three micro-batches of one. Receives are left out: they start
    when they are posted, so their length says nothing. A replica that was not simulated is compared with its
    stage's first.
    """
    expected = {(p.stage, p.replica): _durations(forecast, p.rank) for p in forecast_places}
    worst: dict[Sort, Miss] = {}
    for place in places:
        table = expected.get((place.stage, place.replica), expected.get((place.stage, 0), {}))
        groups: dict[Sort, list[tuple[Action, float, float]]] = {}
        for action, seconds in _durations(measured, place.rank).items():
            if action in table:
                groups.setdefault(_sort(action), []).append((action, seconds, table[action]))
        for sort, entries in groups.items():
            action, took, said = max(entries, key=lambda e: abs(e[1] - e[2]))
            miss = Miss(action, place, took, said, sum(m - f for _, m, f in entries), len(entries))
            if sort not in worst or abs(miss.total) > abs(worst[sort].total):
                worst[sort] = miss
    return sorted(worst.values(), key=lambda miss: -abs(miss.total))


def _sort(action: Action) -> Sort:
    return action.kind, (action.unit or "").rstrip("0123456789"), action.phase


def _durations(step: Step, rank: int) -> Mapping[Action, float]:
    skipped = (Kind.RECV_ACT, Kind.RECV_GRAD, Kind.RELEASE)
    return {
        row.action: row.end - row.start
        for row in step.rows.get(rank, ())
        if row.step == step.number and row.action.kind not in skipped
    }
