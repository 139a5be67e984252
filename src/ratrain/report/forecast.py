"""`forecast.json`: what the simulator said before the run, kept beside what the run then did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.errors import UserError
from ratrain.plan.plan import Plan
from ratrain.program.timeline import Timeline
from ratrain.report.files import read_object, write_whole
from ratrain.report.places import Place, places_of

if TYPE_CHECKING:
    from ratrain.plan.forecasting import StepForecast

VERSION = 1


@dataclass(frozen=True)
class Forecast:
    """A simulated timeline and the memory that goes with it.

    timeline      at least two steps, so that a step is closed by the next one's first FORWARD
    places        of the simulated ranks; replicas that do the same may be left out
    peak_bytes    per place; empty where memory was not forecast
    budget_bytes  memory of one device; None where no budget is set
    basis         where its times are from, for people
    """

    timeline: Timeline
    places: tuple[Place, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    budget_bytes: int | None = None
    basis: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", places_of(self.timeline, self.places))
        if self.peak_bytes and len(self.peak_bytes) != len(self.places):
            raise ValueError(f"{len(self.peak_bytes)} peaks for {len(self.places)} ranks")

    def peak_of(self, place: Place) -> int | None:
        """Forecast peak of `place`, or of the same stage where that replica was not simulated."""
        peaks = {(p.stage, p.replica): peak for p, peak in zip(self.places, self.peak_bytes)}
        return peaks.get((place.stage, place.replica), peaks.get((place.stage, 0)))


def forecast_of(plan: Plan, step: StepForecast) -> Forecast:
    """A plan's simulated step, with the places of the ranks that stand for their replicas."""
    # In simulation tensor ranks are one: their first.
    part = 0 if plan.tensor > 1 else None
    places = tuple(Place(stage * plan.data * plan.tensor, stage, 0, part) for stage in range(plan.pipeline))
    simulation = step.simulation
    return Forecast(simulation.timeline, places, tuple(simulation.peak), plan.budget, step.basis)


def write_forecast(forecast: Forecast, path: Path) -> None:
    """Writes `forecast` as JSON."""
    data = {
        "version": VERSION,
        "timeline": forecast.timeline.to_json(),
        "ranks": [place.to_json() for place in forecast.places],
        "peak_bytes": list(forecast.peak_bytes),
        "budget_bytes": forecast.budget_bytes,
        "basis": forecast.basis,
    }
    write_whole(path, json.dumps(data, separators=(",", ":")))


def read_forecast(path: Path) -> Forecast:
    """Inverse of `write_forecast`; UserError for anything else."""
    data = read_object(path, "a forecast that ratrain wrote")
    try:
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']!r}")
        return Forecast(
            Timeline.from_json(data["timeline"]),
            tuple(Place.from_json(entry) for entry in data["ranks"]),
            tuple(int(peak) for peak in data["peak_bytes"]),
            data["budget_bytes"],
            str(data.get("basis", "")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a forecast of this version ({error}); simulate again") from error
