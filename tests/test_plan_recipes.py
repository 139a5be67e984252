"""Recipes: each lays out what its name says, on any machine; and the file of published rows is read strictly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratrain.config import parse_config
from ratrain.errors import UserError
from ratrain.machine.platform import load_platform
from ratrain.model.spec import load_spec
from ratrain.plan.compute import Compute
from ratrain.plan.fit import fits
from ratrain.plan.plan import Plan
from ratrain.plan.recipes import NAMES, recipe
from ratrain.plan.reproduce.cells import Cell, Table
from ratrain.plan.reproduce.rows import PAPER, load_rows
from ratrain.plan.reproduce.scaling import expected_longest, normal_extreme
from ratrain.plan.reproduce.setting import calibrated
from ratrain.plan.request import Request, read_request
from ratrain.program.passes import PASSES

TINY = load_spec(Path(__file__).parent.parent / "examples" / "models" / "tiny")
COMPUTE = Compute(load_platform("mt3000"), "fp16")


def request(memory: str = "20GB", **parallel: int) -> Request:
    table = {
        "model": {"config": "tiny"},
        "data": {"corpus": "tokens", "seq_len": 64},
        "train": {"global_batch": 32},
        "precision": {"view": "fp16"},
        "machine": {"platform": "mt3000", "devices": 4, "memory": memory},
        "parallel": parallel,
    }
    return read_request(parse_config(table, "test"), TINY)


def plan(name: str, **parallel: int) -> Plan:
    return recipe(name, request(**parallel), COMPUTE)


def layer_rungs(found: Plan) -> set[str]:
    blocks = found.layout().stages
    return {
        rung
        for names, rungs in zip(blocks, found.rungs)
        for name, rung in zip(names, rungs)
        if name.startswith("layer")
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_gives_a_plan_that_fits_and_has_a_time(name: str) -> None:
    found = plan(name)
    assert fits(found)
    assert found.forecast is not None and found.forecast.step and found.forecast.step > 0
    assert found.ranks <= 4


def test_recipes_fix_what_their_names_say() -> None:
    assert plan("zero3-heavy").pipeline == 1 and plan("zero3-heavy").zero == 3
    assert plan("tp-heavy").tensor > 1
    assert plan("full-save").zero <= 2 and layer_rungs(plan("full-save")) == {"keep"}
    assert layer_rungs(plan("backward-checkpoint", pipeline=2)) == {"inputs"}
    assert plan("backward-checkpoint").passes == ("layerwise_sync", "update_prefetch")
    for name in ("tuned", "baseline-1f1b", "tp-heavy", "zero3-heavy"):
        assert plan(name).passes == ()
    assert plan("paper").passes == tuple(PASSES)


def test_a_model_that_no_tensor_degree_divides_is_refused() -> None:
    one_head = replace(TINY, heads=1, kv_heads=1)
    with pytest.raises(UserError, match="tp-heavy: no 2, 4 or 8"):
        recipe("tp-heavy", replace(request(), spec=one_head), COMPUTE)


def test_what_the_request_fixes_stays_fixed() -> None:
    for name in NAMES:
        found = plan(name, pipeline=2, tensor=1, data=2)
        assert (found.pipeline, found.tensor, found.data) == (2, 1, 2)


def test_the_planners_own_is_no_slower_than_a_recipe_of_its_space() -> None:
    def step(name: str) -> float:
        forecast = plan(name, tensor=1).forecast
        assert forecast is not None and forecast.step is not None
        return forecast.step

    for name in ("paper", "tuned", "baseline-1f1b", "backward-checkpoint", "full-save", "zero3-heavy"):
        assert step("ratrain") <= step(name) * (1 + 1e-9)


def test_out_of_memory_is_a_result_with_bytes() -> None:
    found = recipe("full-save", request(memory="1MB"), COMPUTE)
    assert not fits(found)
    assert found.forecast is not None
    assert found.forecast.step is None and found.forecast.peak > 1_000_000


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(UserError, match="no recipe 'fastest'"):
        recipe("fastest", request(), COMPUTE)


def test_a_range_brackets_or_does_not() -> None:
    cell = Cell("row", "step", "s", 10.0, 11.0, "assumed", low=9.0, high=12.0)
    assert cell.brackets and cell.ratio == pytest.approx(10 / 11)
    assert "holds it" in " ".join(cell.words())
    assert Cell("row", "step", "s", 10.0, 13.0, "assumed", low=9.0, high=12.0).brackets is False
    missing = Cell("row", "step", "s", None, 11.0, "assumed")
    assert missing.ratio is None and "does not fit" in missing.words()
    assert Table("name", "title", (cell,)).to_json()["cells"][0]["brackets"] is True


def test_the_longest_of_many_is_longer_than_their_mean() -> None:
    assert normal_extreme(1) == 0.0
    assert normal_extreme(100) == pytest.approx(2.5076, rel=0.005)  # tabled
    assert expected_longest([1.0, 1.0], 1000) == 1.0
    assert expected_longest([0.9, 1.1], 100) == pytest.approx(1 + 0.1 * normal_extreme(100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("calibrates = true", ""), "exactly one"),
        (('recipe = "tuned"', 'recipe = "best"'), "no recipe 'best'"),
        (("seconds = 688.09", "second = 688.09"), "second"),
        (("seconds = 688.09", ""), "either seconds or tokens_per_second"),
    ],
)
def test_damaged_rows_are_refused_in_one_line(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.toml"
    file.write_text(PAPER.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    with pytest.raises(UserError, match=message) as refused:
        load_rows(file)
    assert "\n" not in str(refused.value)


def test_missing_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_rows(tmp_path / "none.toml")


def test_a_folder_without_the_models_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model llama-2-7b in"):
        calibrated(load_rows(), tmp_path)
