"""A step as compact data for the Gantt chart that `gantt_draw.js` draws.

Times are whole ticks; a row is ROW_FIELDS numbers in a flat list per stream. Action names are shared shapes,
such as ``FORWARD(s0,layer3,m#)``, with the micro-batch number put in for ``#``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratrain.program.action import Action, Kind
from ratrain.program.program import STREAMS
from ratrain.program.timeline import Row
from ratrain.report.places import Place
from ratrain.report.steps import Step

TICKS = 1_000_000
"""Ticks of the longest window shown."""

ROWS = 30_000
"""Rows of one step above which replicas are left out, then the blocks of a micro-batch drawn as one bar."""

ROW_FIELDS = ("gap", "duration", "shape", "microbatch", "waited_shape", "waited_microbatch", "step")
"""gap: ticks since the previous row's end on that stream (negative where they overlap); microbatch -1 for
none; waited_shape -1 for no wait; step relative to the one shown."""


def gantt(steps: dict[str, Step], places: dict[str, Sequence[Place]]) -> dict[str, Any]:
    """Data for the chart: one set of lanes per source ("measured", "forecast"), on one time axis.

    Each set starts at its own step's start. Ranks stand in order of replica, then stage; of tensor ranks, which run
    the same actions together, the first is shown.
    """
    tick = max((s.end - s.start for s in steps.values()), default=1.0) / TICKS or 1e-9
    shapes: dict[str, int] = {}
    sets = [_lanes(name, step, places[name], tick, shapes) for name, step in steps.items()]
    return {
        "tick": tick,
        "kinds": [kind.value for kind in Kind],
        "streams": list(STREAMS),
        "fields": len(ROW_FIELDS),
        "shapes": list(shapes),
        "sets": sets,
    }


def _lanes(
    name: str, step: Step, places: Sequence[Place], tick: float, shapes: dict[str, int]
) -> dict[str, Any]:
    together = [p for p in places if p.rank in step.accounts]
    shown = sorted((p for p in together if not p.part), key=lambda p: (p.replica, p.stage))
    note = "the first of tensor ranks" if len(shown) < len(together) else ""
    if sum(len(step.rows[p.rank]) for p in shown) > ROWS and any(p.replica for p in shown):
        note = f"replica 0 of {len({p.replica for p in shown})}"
        shown = [p for p in shown if p.replica == 0]
    merge = sum(len(step.rows[p.rank]) for p in shown) > ROWS
    ranks = []
    for place in shown:
        account = step.accounts[place.rank]
        cause = max(account.causes, key=account.causes.__getitem__, default="")
        streams: dict[str, list[Row]] = {}
        for row in step.rows[place.rank]:
            if row.action.kind is not Kind.RELEASE or row.end - row.start >= tick:
                streams.setdefault(row.stream, []).append(row)
        if merge and "compute" in streams:
            streams["compute"] = _merged(streams["compute"])
        ranks.append(
            {
                "rank": place.rank,
                "stage": place.stage,
                "replica": place.replica,
                "step": account.step,
                "exposed": account.exposed,
                "cause": cause,
                "streams": {s: _encode(rows, step, tick, shapes) for s, rows in streams.items()},
            }
        )
    window = round((step.end - step.start) / tick)
    return {"name": name, "step": step.number, "window": window, "note": note, "ranks": ranks}


def _merged(rows: list[Row]) -> list[Row]:
    """Neighbouring blocks of one micro-batch as one row, named by its first and last block."""
    merged: list[Row] = []
    for row in rows:
        last = merged[-1] if merged else None
        if (
            last is not None
            and row.waited_for is None
            and row.action.microbatch is not None
            and (row.step, row.action._replace(unit=None)) == (last.step, last.action._replace(unit=None))
        ):
            first = (last.action.unit or "").split("..")[0]
            action = row.action._replace(unit=f"{first}..{row.action.unit}")
            merged[-1] = last._replace(action=action, end=row.end)
        else:
            merged.append(row)
    return merged


def _encode(rows: Sequence[Row], step: Step, tick: float, shapes: dict[str, int]) -> list[int]:
    def shape(action: Action) -> int:
        text = str(action if action.microbatch is None else action._replace(microbatch=0))
        return shapes.setdefault(text.replace(",m0", ",m#"), len(shapes))

    numbers: list[int] = []
    clock = 0
    for row in rows:
        start = round((row.start - step.start) / tick)
        end = round((row.end - step.start) / tick)
        waited = row.waited_for
        numbers += [start - clock, end - start, shape(row.action), _microbatch(row.action)]
        numbers += [-1, -1] if waited is None else [shape(waited), _microbatch(waited)]
        numbers.append(row.step - step.number)
        clock = end
    return numbers


def _microbatch(action: Action) -> int:
    return -1 if action.microbatch is None else action.microbatch
