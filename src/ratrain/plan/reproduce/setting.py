"""Models, machine and the one calibrated factor that every table shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ratrain.config import parse_config
from ratrain.errors import UserError
from ratrain.machine.platform import Platform, load_platform
from ratrain.model.spec import ModelSpec, load_spec
from ratrain.plan.compute import Compute
from ratrain.plan.plan import Plan
from ratrain.plan.recipes import recipe
from ratrain.plan.reproduce.rows import Rows, StepRow
from ratrain.plan.request import Request, read_request
from ratrain.plan.simulated import with_time

PLATFORM, VIEW = "mt3000", "fp16"
"""What all published rows ran on, and in."""


@dataclass(frozen=True)
class Setting:
    """rows     what is published
    models   folder of model configurations by name
    compute  prices, calibrated
    """

    rows: Rows
    models: Path
    compute: Compute

    def spec(self, model: str) -> ModelSpec:
        """The model of that name, or path; UserError if there is none."""
        found = next((path for path in (self.models / model, Path(model)) if path.exists()), None)
        if found is None:
            raise UserError(
                f"no model {model} in {self.models}; name the folder of model configurations (--models)"
            )
        return _spec(found)

    @property
    def budget(self) -> int:
        """Bytes that one device has."""
        platform = self.compute.source
        assert isinstance(platform, Platform) and platform.device.memory is not None
        return int(platform.device.memory)

    def request(self, model: str, devices: int, global_batch: int, **degrees: int | None) -> Request:
        """A request on the platform; a degree of None is left open."""
        parallel: dict[str, Any] = {name: n for name, n in degrees.items() if n is not None}
        config = parse_config(
            {
                "model": {"config": model},
                "data": {"corpus": "fixed token stream", "seq_len": self.rows.sequence},
                "train": {"global_batch": global_batch},
                "precision": {"view": VIEW},
                "machine": {"platform": PLATFORM, "devices": devices},
                "parallel": parallel,
            },
            "reproduce",
        )
        return read_request(config, self.spec(model))

    def plan(self, name: str, model: str, devices: int, global_batch: int, **degrees: int | None) -> Plan:
        """The plan of a recipe; without a step if it does not fit."""
        return recipe(name, self.request(model, devices, global_batch, **degrees), self.compute)

    def plan_of(self, row: StepRow, **degrees: int | None) -> Plan:
        """The plan of a published row, or of another reading of its degrees."""
        chosen = {"pipeline": row.pipeline, "tensor": row.tensor, **degrees}
        return self.plan(row.recipe, row.model, row.devices, row.global_batch, **chosen)

    def readings(self, row: StepRow) -> list[Plan]:
        """The plans of all plausible degrees of a row that exist and fit."""
        plans = []
        for degrees in product(*row.degrees.values()) if row.degrees else ():
            try:
                plan = self.plan_of(row, **dict(zip(row.degrees, degrees)))
            except UserError:  # such a degree does not divide the model or the devices
                continue
            if step_of(plan) is not None:
                plans.append(plan)
        return plans


def calibrated(rows: Rows, models: Path) -> Setting:
    """A setting whose efficiency of computing makes the simulated step of the calibrating row the published
    one, by the secant method; nothing else is fitted."""
    plain = Setting(rows, models, Compute(load_platform(PLATFORM), VIEW))
    row, spec = rows.calibrating, plain.spec(rows.calibrating.model)
    plan, seconds = plain.plan_of(row), rows.calibrating.step(rows.sequence)

    def error(efficiency: float) -> float:
        step = step_of(with_time(plan, spec, plain.compute.at(efficiency)))
        assert step is not None
        return step - seconds

    left, right = 1.0, 0.95
    at_left, at_right = error(left), error(right)
    for _ in range(6):
        if abs(at_right) < 1e-4 * seconds or at_right == at_left:
            break
        left, right = right, right - at_right * (right - left) / (at_right - at_left)
        at_left, at_right = at_right, error(right)
    return replace(plain, compute=plain.compute.at(right))


def step_of(plan: Plan) -> float | None:
    """Seconds of the simulated step; None if the plan does not fit."""
    assert plan.forecast is not None
    return plan.forecast.step


def describe(plan: Plan) -> str:
    """The layout in a few words."""
    tensor = f" T={plan.tensor}" if plan.tensor > 1 else ""
    return f"P={plan.pipeline} D={plan.data}{tensor} ZeRO-{plan.zero} b={plan.micro_batch}"


@cache
def _spec(path: Path) -> ModelSpec:
    return load_spec(path)
