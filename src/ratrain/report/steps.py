"""Cutting a timeline into steps, each with every rank's account of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ratrain.program.action import Kind
from ratrain.program.timeline import Row, StepAccount, Timeline, account


@dataclass(frozen=True)
class Step:
    """One step of all ranks, on rank 0's clock.

    number      of the step
    start, end  seconds: from the first FORWARD of any rank to the first FORWARD of the next step on the last
                rank (end of the last row where the timeline ends)
    rows        per rank all rows that overlap [start, end], neighbouring steps' too, in order of start, and the
                compute row after them, whose wait may reach into the step
    accounts    per rank where its own step went
    """

    number: int
    start: float
    end: float
    rows: dict[int, list[Row]]
    accounts: dict[int, StepAccount]

    @property
    def time(self) -> float:
        """Step time: the slowest rank's, seconds."""
        return max(a.step for a in self.accounts.values())

    @property
    def exposed(self) -> tuple[float, float]:
        """Exposed time, seconds: mean and maximum over ranks."""
        return _mean_max([a.exposed for a in self.accounts.values()])

    @property
    def tail(self) -> tuple[float, float]:
        """Tail, seconds: mean and maximum over ranks."""
        return _mean_max([a.tail for a in self.accounts.values()])

    @property
    def causes(self) -> dict[str, float]:
        """Exposed seconds by cause, mean over ranks, the largest first."""
        total: dict[str, float] = {}
        for entry in self.accounts.values():
            for cause, seconds in entry.causes.items():
                total[cause] = total.get(cause, 0.0) + seconds / len(self.accounts)
        return dict(sorted(total.items(), key=lambda item: -item[1]))


def steps_of(timeline: Timeline) -> list[Step]:
    """The steps of `timeline` that a next step closes on every rank; the only one if there is just one."""
    lanes: dict[int, list[Row]] = {}
    for row in timeline.rows:
        shift = timeline.offsets.get(row.rank, 0.0)
        lanes.setdefault(row.rank, []).append(row._replace(start=row.start + shift, end=row.end + shift))
    opens: dict[int, dict[int, int]] = {}  # step -> rank -> index of its first FORWARD among compute rows
    compute: dict[int, list[Row]] = {}
    for rank, rows in lanes.items():
        rows.sort(key=lambda r: (r.start, r.end))
        compute[rank] = [r for r in rows if r.stream == "compute"]
        for index, row in enumerate(compute[rank]):
            if row.action.kind is Kind.FORWARD:
                opens.setdefault(row.step, {}).setdefault(rank, index)
    numbers = [n for n in sorted(opens) if opens[n].keys() == lanes.keys()]
    closed = [n for n in numbers if n + 1 in numbers] or numbers[-1:]
    return [_step(n, lanes, compute, opens) for n in closed]


def typical(steps: Sequence[Step]) -> Step | None:
    """The step whose time is nearest to the median, the later of equals; None of none."""
    if not steps:
        return None
    median = statistics.median(step.time for step in steps)
    return min(reversed(steps), key=lambda step: abs(step.time - median))


def _step(
    number: int,
    lanes: dict[int, list[Row]],
    compute: dict[int, list[Row]],
    opens: dict[int, dict[int, int]],
) -> Step:
    accounts: dict[int, StepAccount] = {}
    for rank, rows in compute.items():
        first = opens[number][rank]
        after = opens.get(number + 1, {}).get(rank)
        entry = account(rows[first:after], rows[after] if after is not None else None)
        assert entry is not None, "the rows start with a FORWARD"
        accounts[rank] = entry
    begins = {rank: compute[rank][opens[number][rank]].start for rank in lanes}
    start = min(begins.values())
    end = max(begins[rank] + accounts[rank].step for rank in lanes)
    inside = {rank: list(_inside(rows, start, end)) for rank, rows in lanes.items()}
    return Step(number, start, end, inside, accounts)


def _inside(rows: Sequence[Row], start: float, end: float) -> Iterator[Row]:
    closed = False
    for row in rows:
        if row.end > start and (row.start < end or (row.stream == "compute" and not closed)):
            closed = row.start >= end
            yield row


def _mean_max(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), max(values)
