"""The published MT-3000 rows: peaks, one prediction, and the gain over the paper's schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratrain.plan.fit import fits
from ratrain.plan.recipes import RATRAIN
from ratrain.plan.reproduce.rows import load_rows
from ratrain.plan.reproduce.setting import Setting, calibrated, step_of
from ratrain.plan.reproduce.tables import errors, memory, published

MODELS = Path(__file__).parent.parent / "examples" / "models"


@pytest.fixture(scope="module")
def setting() -> Setting:
    return calibrated(load_rows(), MODELS)


def test_feasibility_rows_fit_and_their_peaks_are_right(setting: Setting) -> None:
    cells = memory(setting).cells
    for cell in cells:
        assert cell.ratio == pytest.approx(1, abs=0.1), cell
        assert not cell.note.startswith("out of memory")
    assert [c.ours for c in cells if c.unit == "clusters"] == [8, 16]


def test_one_calibrated_row_predicts_another_model(setting: Setting) -> None:
    assert 0.9 < setting.compute.efficiency < 1.1
    kept = tuple(r for r in setting.rows.step if r.calibrates or r.name.endswith("Backward-Ckpt"))
    few = replace(setting, rows=replace(setting.rows, step=tuple(replace(r, degrees={}) for r in kept)))
    table = published(few)
    first, second = table.cells
    assert (first.reading, second.reading) == ("calibrated", "assumed")
    assert first.ratio == pytest.approx(1, abs=1e-3)
    assert second.ratio == pytest.approx(1, abs=0.05)
    (error,) = errors(few, table).cells
    assert error.ours == pytest.approx(abs(second.ratio - 1))


def test_own_placement_beats_the_papers_schedule_at_the_same_depth(setting: Setting) -> None:
    """Baichuan2-13B, P=8: the head's stage holds fewer layers."""
    work = ("baichuan2-13b", 256, 4096)
    paper = setting.plan("paper", *work, pipeline=8, tensor=1)
    own = setting.plan(RATRAIN, *work, pipeline=8, tensor=1)
    assert fits(paper) and fits(own)
    assert own.layers[-1] < min(own.layers[:-1])
    assert (step_of(paper) or 0) > 1.1 * (step_of(own) or 0)
