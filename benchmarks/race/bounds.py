"""How near RATrain comes to what no schedule of its layout can beat, row by row.

Costs are of a profile measured behind the row's links with the row's ranks on their cores. From the bound to the
simulated step is what the schedule leaves, named by what stages wait for; from there to the measured step is what
simulation does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from race.profiles import profile_of
from race.ratrain_plan import config_of, plan_of
from race.results import Result
from race.rows import RATRAIN, Row
from race.tables import line
from race.verdict import counts
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
    """Seconds of a row's step: the bound, simulated, measured, the best peer's (None: none counts), and per cause
    what a rank waits in simulation."""

    row: str
    bound: float
    simulated: float
    measured: float
    best_peer: float | None
    causes: Mapping[str, float]

    def cells(self) -> list[str]:
        """The row of the table."""
        named = sorted(self.causes.items(), key=lambda entry: -entry[1])[:_NAMED]
        peer = "" if self.best_peer is None else f"{self.bound / self.best_peer:.2f}"
        return [
            self.row,
            f"{self.bound:.3f}",
            f"{self.simulated:.3f}",
            f"{self.measured:.3f}",
            f"{self.measured / self.bound:.2f}",
            peer,
            ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in named if seconds >= 0.005),
        ]


def bound_of(row: Row, result: Result, folder: Path) -> Bound | None:
    """The row's first RATrain that ran, and the fastest peer that trained the same within the limit; measures the
    profile if `folder` has none yet."""
    mine = [case for case in row.cases if case.tool == RATRAIN and counts(row, result, case)]
    peers = [case for case in row.cases if case.tool != RATRAIN and counts(row, result, case)]
    if not mine:
        return None
    case = mine[0]
    spec, plan = case.model.spec(), plan_of(case)
    priced = replace(case, options={**case.options, "platform": str(profile_of(row, case, folder))})
    forecast = forecast_step(plan, spec, config_of(priced))
    seconds = {c.name: median(result.records[c.name].windows) for c in (case, *peers)}
    return Bound(
        row.name,
        forecast.bound,
        forecast.simulation.step,
        seconds.pop(case.name),
        min(seconds.values(), default=None),
        forecast.simulation.causes,
    )


def table(bounds: Sequence[Bound]) -> str:
    """As Markdown."""
    return "\n".join([line(_HEADER), line(["---"] * len(_HEADER)), *(line(b.cells()) for b in bounds)])
