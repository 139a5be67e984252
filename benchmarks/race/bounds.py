"""How near RATrain comes to what no schedule of its layout can beat, row by row.

Costs are of a profile measured behind the row's links with the row's ranks on their cores. From the bound to the
simulated step is what the schedule leaves, named by what stages wait for; from there to the measured step is what
simulation does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from race.arena import race
from race.profiles import profile_of, profile_path
from race.ratrain_plan import config_of, plan_of
from race.results import Result
from race.rows import RATRAIN, Case, Row
from race.tables import line
from race.verdict import counts, ratio
from ratrain.plan.forecasting import forecast_step

_HEADER = (
    "row",
    "bound s",
    "simulated s",
    "RATrain s",
    "RATrain / bound",
    "bound / best peer",
    "what stages wait for in simulation, mean of a rank",
)
_NAMED = 3
"""Causes told of a row."""


@dataclass(frozen=True)
class Bound:
    """Seconds of a row's step: the bound, simulated, measured alone; RATrain over the best peer in the row's race
    (None: no peer counts); and seconds by cause that a rank waits in simulation."""

    row: str
    bound: float
    simulated: float
    measured: float
    ratio: float | None
    causes: Mapping[str, float]

    def cells(self) -> list[str]:
        """The row of the table."""
        named = sorted(self.causes.items(), key=lambda entry: -entry[1])[:_NAMED]
        peer = "" if self.ratio is None else f"{self.bound / self.measured * self.ratio:.2f}"
        return [
            self.row,
            f"{self.bound:.3f}",
            f"{self.simulated:.3f}",
            f"{self.measured:.3f}",
            f"{self.measured / self.bound:.2f}",
            peer,
            ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in named if seconds >= 0.005),
        ]


def measure(raced: Sequence[tuple[Row, Result]], folder: Path, tell: Callable[[str], None]) -> list[Bound]:
    """Of each row its first RATrain that counts, run alone once more right after a profile of its links and ranks.
    Rows that share a profile follow each other: a machine drifts, and bound and step should drift together.
    `folder` must be new, or the profiles in it are taken for this hour's."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = [(row, result, case) for row, result in raced if (case := _first(row, result)) is not None]
    mine.sort(key=lambda entry: profile_path(entry[0], entry[2], folder))
    return [_bound(row, result, case, folder, tell) for row, result, case in mine]


def _first(row: Row, result: Result) -> Case | None:
    return next((case for case in row.cases if case.tool == RATRAIN and counts(row, result, case)), None)


def _bound(row: Row, result: Result, case: Case, folder: Path, tell: Callable[[str], None]) -> Bound:
    spec, plan = case.model.spec(), plan_of(case)
    priced = replace(case, options={**case.options, "platform": str(profile_of(row, case, folder))})
    forecast = forecast_step(plan, spec, config_of(priced))
    tell(row.name)
    alone = race(replace(row, cases=(case,), bars=()), 1, folder, tell)[case.name]
    peers = [c for c in row.cases if c.tool != RATRAIN and counts(row, result, c)]
    ratios = [ratio(result.records[case.name], result.records[peer.name])[0] for peer in peers]
    return Bound(
        row.name,
        forecast.bound,
        forecast.simulation.step,
        median(alone.windows),
        max(ratios, default=None),
        forecast.simulation.causes,
    )


def table(bounds: Sequence[Bound]) -> str:
    """As Markdown."""
    return "\n".join([line(_HEADER), line(["---"] * len(_HEADER)), *(line(b.cells()) for b in bounds)])
