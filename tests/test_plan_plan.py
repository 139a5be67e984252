"""Plan: its JSON form, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec
from ratrain.plan.fit import with_memory
from ratrain.plan.plan import Plan, fingerprint, load_plan, uniform_rungs
from ratrain.program.passes import PASSES


def tiny_spec(**changes: Any) -> ModelSpec:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 128,
    }
    return ModelSpec.from_dict(config | changes)


def make_plan(spec: ModelSpec, **changes: Any) -> Plan:
    layers = changes.get("layers", (2, 2))
    values: dict[str, Any] = {
        "model": fingerprint(spec),
        "tied": spec.tied,
        "layers": layers,
        "data": 1,
        "zero": 1,
        "micro_batch": 1,
        "global_batch": 4,
        "seq_len": 64,
        "view": "fp32",
        "grad": "fp32",
        "reduce": "fp32",
        "rungs": uniform_rungs(layers, "keep"),
        "ahead": 1,
        "elide": True,
        "gated": True,
        "passes": tuple(PASSES),
        "devices": len(layers) * changes.get("data", 1),
        "budget": 10**9,
    }
    return Plan(**(values | changes))


def test_json_round_trip(tmp_path: Path) -> None:
    plan = with_memory(make_plan(tiny_spec(), why=("because",)), tiny_spec())
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]


def test_layout_is_what_the_plan_says() -> None:
    layout = make_plan(tiny_spec(), layers=(3, 1), data=2, global_batch=8).layout()
    assert layout.layer_counts == (3, 1)
    assert (layout.replicas, layout.microbatches) == (2, 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.update(version=99), "plan version 99"),
        (lambda t: t.update(format="x"), "not a plan"),
        (lambda t: t.pop("zero"), "zero is missing"),
        (lambda t: t.update(zeroo=1), "zeroo is not a field"),
        (lambda t: t.update(data="2"), "data must be a int"),
        (lambda t: t.update(layers=[2, "2"]), "layers must be a int"),
        (lambda t: t.update(rungs=[["keep"]]), "rungs must name one rung per block"),
        (lambda t: t.update(forecast={"memory": [{}]}), "damaged plan"),
    ],
)
def test_foreign_and_damaged_plans_are_refused(tmp_path: Path, damage: Any, message: str) -> None:
    table = json.loads(json.dumps(make_plan(tiny_spec()).to_json()))
    damage(table)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    with pytest.raises(UserError, match=message) as caught:
        load_plan(path)
    assert "\n" not in str(caught.value)


def test_cut_file_and_missing_file_are_refused(tmp_path: Path) -> None:
    make_plan(tiny_spec()).save(tmp_path / "plan.json")
    cut = tmp_path / "cut.json"
    cut.write_text((tmp_path / "plan.json").read_text()[:-20])
    with pytest.raises(UserError, match="not JSON"):
        load_plan(cut)
    with pytest.raises(UserError, match="No such file"):
        load_plan(tmp_path / "none.json")


def test_batches_that_do_not_multiply_up_are_refused_with_their_numbers() -> None:
    with pytest.raises(UserError, match=r"global_batch 4 .* 6 = parallel.data 3 x train.micro_batch 2"):
        make_plan(tiny_spec(), data=3, micro_batch=2)


def test_plan_of_another_model_is_refused() -> None:
    plan = make_plan(tiny_spec())
    plan.require_model(tiny_spec(hidden_act="silu"))
    with pytest.raises(UserError, match="the plan is of model"):
        plan.require_model(tiny_spec(hidden_size=128))
