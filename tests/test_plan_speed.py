"""Planning for large machines takes seconds; limits are processor time, several times what it takes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratrain.machine.mt3000.chip import load_chip
from ratrain.model.operators import Operator
from ratrain.plan.tile_prices import TilePrices, fingerprint

EXAMPLES = Path(__file__).parent.parent / "examples"


def planned(name: str, devices: int, cache: Path) -> tuple[dict[str, Any], float]:
    """The plan of an example, and processor seconds that the command took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "ratrain", "plan", str(EXAMPLES / name), "--devices", str(devices), "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=EXAMPLES.parent,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), seconds


@pytest.mark.parametrize(
    ("name", "devices", "limit"),
    [("llama-2-7b-mt3000.toml", 8, 8.0), ("qwen2.5-32b-mt3000.toml", 1024, 20.0)],
)
def test_large_models_are_planned_in_seconds(name: str, devices: int, limit: float, tmp_path: Path) -> None:
    answer, seconds = planned(name, devices, tmp_path)
    plan = answer["plan"]
    assert len(plan["layers"]) * plan["data"] * plan["tensor"] <= devices
    assert max(stage["total"] for stage in plan["forecast"]["memory"]) <= plan["budget"]
    assert len(answer["table"]) == 10
    assert seconds < limit


MATMUL = Operator("q_proj", "matmul", 64, 96, 128)


def test_prices_are_remembered_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TilePrices(load_chip(), tmp_path)
    seconds = [first.seconds(MATMUL, backward) for backward in (False, True)]
    monkeypatch.delattr("ratrain.machine.mt3000.profile.operator_seconds")
    second = TilePrices(load_chip(), tmp_path)
    assert [second.seconds(MATMUL, backward) for backward in (False, True)] == seconds


@pytest.mark.parametrize("content", ["", "[1]", '{"a": -1.0}', '{"a": "x"}', '{"a": NaN}'])
def test_a_damaged_file_of_prices_is_made_anew(content: str, tmp_path: Path) -> None:
    good = TilePrices(load_chip(), tmp_path / "good").seconds(MATMUL, False)
    prices = TilePrices(load_chip(), tmp_path)
    prices.file.write_text(content)
    assert TilePrices(load_chip(), tmp_path).seconds(MATMUL, False) == good


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    prices = TilePrices(load_chip(), tmp_path / "file" / "below")
    assert prices.seconds(MATMUL, False) > 0


def test_another_chip_has_other_prices() -> None:
    assert fingerprint(load_chip()) != fingerprint(load_chip("ft_m7032"))
