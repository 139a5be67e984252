"""Timeline: when each action started and ended. The executor measures one, the simulator forecasts one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ratrain.program.action import Action, Kind, parse

VERSION = 1


class Row(NamedTuple):
    """One action of one rank in one step.

    start, end   seconds on the rank's own clock
    waited_for   on `compute`: the action that was still unfinished when the stream last stood still before
                 this one (None: it did not wait)
    """

    rank: int
    step: int
    stream: str
    action: Action
    start: float
    end: float
    waited_for: Action | None = None


@dataclass
class Timeline:
    """Rows of several ranks, with each rank's clock offset (seconds to add to reach rank 0's clock)."""

    rows: list[Row] = field(default_factory=list)
    offsets: dict[int, float] = field(default_factory=dict)
    source: str = "measured"

    def to_json(self) -> dict[str, object]:
        """A plain, versioned form."""
        return {
            "version": VERSION,
            "source": self.source,
            "offsets": {str(rank): offset for rank, offset in self.offsets.items()},
            "rows": [
                [r.rank, r.step, r.stream, str(r.action), r.start, r.end, str(r.waited_for or "")]
                for r in self.rows
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, object]) -> Timeline:
        """Inverse of `to_json`; raises ValueError for another version."""
        if data.get("version") != VERSION:
            raise ValueError(f"timeline version {data.get('version')!r}, expected {VERSION}")
        rows = [
            Row(rank, step, stream, parse(action), start, end, parse(waited) if waited else None)
            for rank, step, stream, action, start, end, waited in data["rows"]  # type: ignore[attr-defined]
        ]
        offsets = {int(k): float(v) for k, v in data["offsets"].items()}  # type: ignore[attr-defined]
        return cls(rows, offsets, str(data["source"]))


@dataclass(frozen=True)
class StepAccount:
    """Where one rank's step went, in seconds.

    step     from the first FORWARD of the step to the first FORWARD of the next
    exposed  step minus FORWARD and BACKWARD on the compute stream
    tail     exposed time between the last BACKWARD and the next first FORWARD, less waiting for RECV_ACT
    causes   exposed time by kind of the action that was run or awaited; "idle" where nothing was awaited
    """

    step: float
    exposed: float
    tail: float
    causes: dict[str, float]


def account(rows: Sequence[Row], following: Row | None) -> StepAccount | None:
    """Books one rank's compute rows of one step, given the first FORWARD row of its next step.

    Steps are cut at first FORWARDs, so rows that precede the step's first FORWARD (deferred updates) belong
    to the previous step's account: pass all compute rows from that FORWARD up to `following`. Without
    `following` (last step) the end of the last row closes the step. None if there is no FORWARD.
    """
    first = next((r for r in rows if r.action.kind is Kind.FORWARD), None)
    if first is None:
        return None
    end = following.start if following is not None else rows[-1].end
    causes: dict[str, float] = {}
    busy = 0.0
    tail_start = max((r.end for r in rows if r.action.kind is Kind.BACKWARD), default=end)
    tail = 0.0
    clock = first.start

    def book(start: float, stop: float, kind: str) -> None:
        nonlocal tail
        if stop <= start:
            return
        causes[kind] = causes.get(kind, 0.0) + stop - start
        late = stop - max(start, tail_start)
        if late > 0 and kind != Kind.RECV_ACT.value:
            tail += late

    inside = [r for r in rows if r.start >= first.start]
    for row in [*inside, *([following] if following is not None else [])]:
        book(clock, row.start, row.waited_for.kind.value if row.waited_for else "idle")
        if row is following:
            break
        if row.action.kind in (Kind.FORWARD, Kind.BACKWARD):
            busy += row.end - row.start
        else:
            book(row.start, row.end, row.action.kind.value)
        clock = row.end
    step = end - first.start
    return StepAccount(step, step - busy, tail, causes)
