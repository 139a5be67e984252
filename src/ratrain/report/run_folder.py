"""What a run left behind: its folder's files as values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratrain.errors import UserError
from ratrain.program.timeline import Timeline
from ratrain.report.files import read_object
from ratrain.report.forecast import Forecast, read_forecast
from ratrain.report.places import Place, places_of
from ratrain.report.trace import read_places, read_trace


@dataclass(frozen=True)
class RunFolder:
    """A run folder, read. Whatever the run did not write is empty or None.

    name         of the folder
    config       text of run.toml
    about        what the run said of itself: the header of metrics.jsonl over plan.json
    updates      objects of metrics.jsonl, one per update, in order
    evaluations  objects with `eval_loss`
    timeline     measured steps
    places       of all ranks
    forecast     what the simulator expected
    """

    name: str
    config: str
    about: Mapping[str, Any]
    updates: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    timeline: Timeline | None
    places: tuple[Place, ...]
    forecast: Forecast | None

    @property
    def peaks(self) -> list[int]:
        """Largest measured peak of each rank over the run, bytes; empty if not measured."""
        columns = [u["peak_bytes"] for u in self.updates if u.get("peak_bytes")]
        return [max(column) for column in zip(*columns)]

    @property
    def forecast_peaks(self) -> list[int | None]:
        """Forecast peak per place, bytes."""
        told = self.about.get("forecast_peak_bytes")
        if told:
            return list(told)
        return [self.forecast.peak_of(place) if self.forecast else None for place in self.places]

    @property
    def budgets(self) -> list[int | None]:
        """Budget per place, bytes."""
        budget = self.about.get("budget_bytes", self.forecast.budget_bytes if self.forecast else None)
        return list(budget) if isinstance(budget, list) else [budget] * len(self.places)


def read_run(folder: Path) -> RunFolder:
    """Reads a run folder; UserError if it is not one or a file in it is damaged."""
    metrics = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected the run folder of a `ratrain train`")
    if not metrics.exists():
        raise UserError(
            f"{folder}: not a run folder (no metrics.jsonl); expected one that `ratrain train` wrote"
        )
    header, updates, evaluations = _metrics(metrics)
    plan_file, trace, forecast = (folder / name for name in ("plan.json", "trace.json", "forecast.json"))
    plan = read_object(plan_file, "a plan that ratrain wrote") if plan_file.exists() else {}
    timeline = read_trace(trace) if trace.exists() else None
    told = [Place.from_json(entry) for entry in header.get("ranks", ())]
    if not told and timeline is not None:
        told = list(places_of(timeline, read_places(trace)))
    config = folder / "run.toml"
    return RunFolder(
        name=folder.resolve().name,
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        about={**plan, **header},
        updates=tuple(updates),
        evaluations=tuple(evaluations),
        timeline=timeline,
        places=tuple(sorted(told)),
        forecast=read_forecast(forecast) if forecast.exists() else None,
    )


def _metrics(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Header, updates and evaluations. A step that occurs again (after a resume) replaces the earlier one."""
    header: dict[str, Any] = {}
    updates: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if "run" in entry:
                header.update(entry["run"])
            elif "eval_loss" in entry:
                evaluations[int(entry["step"])] = entry
            else:
                updates[int(entry["step"])] = entry
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # the run was killed while it wrote its last line
                continue
            raise UserError(f"{path}, line {number}: not a metrics object ({error})") from error
    return header, [updates[s] for s in sorted(updates)], [evaluations[s] for s in sorted(evaluations)]
