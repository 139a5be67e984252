"""What a process holds beside its model: the forecast of this machine against runs that were measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratrain.config import MachineConfig, load_config
from ratrain.machine.platform import load_platform
from ratrain.model.spec import load_spec
from ratrain.plan.compute import Compute
from ratrain.plan.reproduce.rows import load_rows
from ratrain.plan.reproduce.setting import calibrated
from ratrain.plan.resolve import resolve
from ratrain.plan.target import load_target

ROOT = Path(__file__).parent.parent

MEASURED = {
    "tiny": ((387_506_176, 383_365_120), (382_509_056, 382_795_776)),
    "demo": ((550_739_968, 560_115_712), (567_967_744, 560_578_560)),
}
"""VmHWM per stage and replica after the whole run; docs/memory.md."""


@pytest.mark.parametrize("name", MEASURED)
def test_the_forecast_peak_is_within_5_percent_of_measured_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(Path(f"examples/{name}.toml"))
    plan = resolve(config, load_spec(Path(config.model.config)))
    assert plan.forecast is not None
    for stage, ranks in zip(plan.forecast.memory, MEASURED[name], strict=True):
        for measured in ranks:
            assert stage.total == pytest.approx(measured, rel=0.05)


def test_this_machine_has_the_memory_that_the_system_says_shared() -> None:
    assert load_platform("local").device.memory is None
    whole, half = (load_target(MachineConfig(), devices).memory for devices in (1, 2))
    assert half == whole // 2 > 0
    assert load_target(MachineConfig(memory="3 GB"), 2).memory == 3_000_000_000


def test_an_unmeasured_machine_says_that_it_guesses() -> None:
    assert "ratrain profile" in Compute(load_platform("local"), "fp32").basis


def test_the_shipped_efficiency_is_what_the_calibration_finds() -> None:
    shipped = Compute(load_platform("mt3000"), "fp16").efficiency
    fitted = calibrated(load_rows(), ROOT / "examples" / "models").compute.efficiency
    assert fitted == pytest.approx(shipped, abs=5e-4)
