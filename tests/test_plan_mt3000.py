"""The published MT-3000 rows: peaks, one prediction, and the gain over the paper's schedule."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import planner
from ratrain.machine.platform import load_platform
from ratrain.plan.compute import Compute

ROWS = tomllib.loads(planner.ROWS.read_text(encoding="utf-8"))
PLAIN = Compute(load_platform("mt3000"), "fp16")


def test_feasibility_rows_fit_and_their_peaks_are_right() -> None:
    for row in planner.peak_rows(ROWS, PLAIN):
        assert row["predicted_bytes"] <= row["budget_bytes"]
        assert abs(row["error"]) < 0.1, row


def test_one_calibrated_row_predicts_another_model() -> None:
    calibrating = next(row for row in ROWS["step"] if row.get("calibrates"))
    efficiency = planner.calibrate(calibrating, ROWS["sequence"], PLAIN)
    assert 0.9 < efficiency < 1.1
    named = {"step": [r for r in ROWS["step"] if r is calibrating or r["name"].endswith("Backward-Ckpt")]}
    table = planner.published_rows({**ROWS, **named}, PLAIN.at(efficiency))
    assert table[0]["error"] == pytest.approx(0, abs=1e-3)
    assert abs(table[1]["error"]) < 0.05


def test_own_placement_beats_the_papers_schedule_at_the_same_depth() -> None:
    """Baichuan2-13B, P=8: the head's stage holds fewer layers."""
    common = ("baichuan2-13b", 256, 4096, ROWS["sequence"])
    paper = planner.Case(*common, "paper", 8, zero=2).best(PLAIN)
    own = planner.Case(*common, "own", 8, zero=2).best(PLAIN)
    assert own.layers[-1] < min(own.layers[:-1])
    assert planner.step_of(paper) > 1.1 * planner.step_of(own)
