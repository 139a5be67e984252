"""What the executor itself costs: time of the compute stream that is neither an action nor a wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratrain.program.action import Kind
from ratrain.program.timeline import Row, Timeline

MOST = 0.03
"""Share of the step that program and executor may take."""
_BOOKKEEPING = (Kind.RELEASE,)
"""Actions that compute nothing."""


@dataclass(frozen=True)
class Overhead:
    """Seconds of one rank over a window.

    span       from the first action to the end of the last
    busy       in actions that compute
    waiting    nothing to do until another stream had finished
    waking     from then until the compute stream went on
    between    between two actions without a wait, and actions that compute nothing
    actions    how many the compute stream ran
    """

    rank: int
    span: float
    busy: float
    waiting: float
    waking: float
    between: float
    actions: int

    @property
    def share(self) -> float:
        """Of the span, what is neither computing nor waiting."""
        return (self.waking + self.between) / self.span


def overheads(timelines: Sequence[Timeline]) -> list[Overhead]:
    """Of every rank, from the timelines of one window."""
    return [_of_rank(timeline.rows) for timeline in timelines]


def _of_rank(rows: Sequence[Row]) -> Overhead:
    ends = {(row.step, row.action): row.end for row in rows}
    compute = sorted((row for row in rows if row.stream == "compute"), key=lambda row: row.start)
    busy = waiting = waking = between = 0.0
    clock = compute[0].start
    for row in compute:
        if row.waited_for is None:
            between += row.start - clock
        else:
            # The awaited action is this step's, or of the step before, and ended during the wait. A float that
            # was pulled forward names what its stream waited for, which is still not done.
            awaited = [ends.get((step, row.waited_for)) for step in (row.step, row.step - 1)]
            released = max((end for end in awaited if end and clock < end <= row.start), default=row.start)
            waiting += released - clock
            waking += row.start - released
        if row.action.kind in _BOOKKEEPING:
            between += row.end - row.start
        else:
            busy += row.end - row.start
        clock = row.end
    span = compute[-1].end - compute[0].start
    return Overhead(compute[0].rank, span, busy, waiting, waking, between, len(compute))
