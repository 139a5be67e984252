"""`ratrain plan`: its answer for one layout, for all, and as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from ratrain.config import parse_config
from ratrain.errors import UserError
from ratrain.plan.command import Answer, comparison, headline, plan_command, plan_table, stage_table
from ratrain.plan.plan import Plan
from test_plan_search import heavy_head

SPEC = heavy_head(8)


def ask(explain: str | None = None, devices: int = 4, **parallel: Any) -> Answer:
    config = parse_config(
        {
            "model": {"config": "x"},
            "data": {"corpus": "x", "seq_len": 1024},
            "train": {"global_batch": 32},
            "precision": {"view": "bf16"},
            "parallel": parallel,
            "machine": {"platform": "ethernet-24gb", "devices": devices},
        },
        "run.toml",
    )
    args = argparse.Namespace(devices=None, explain=explain, recipe=None, top=4)
    return plan_command(config, SPEC, args)


def test_best_comes_first_and_json_holds_a_plan_that_loads() -> None:
    answer = ask()
    steps = [plan.forecast.step for plan in answer.table if plan.forecast]
    assert steps == sorted(steps) and len(steps) == 4  # type: ignore[type-var]
    table = json.loads(json.dumps(answer.to_json()))
    assert Plan.from_json(table["plan"]) == answer.best
    assert table["table"][0]["step_s"] == steps[0]
    assert len(plan_table(answer.table)[1]) == 4
    assert len(stage_table(answer.best)[1]) == answer.best.pipeline
    assert "tokens/s" in headline(answer.best) and answer.best.why


def test_explain_answers_for_one_layout_and_compares_it() -> None:
    answer = ask("P=2,D=1,ZeRO=1,T=1")
    assert (answer.best.pipeline, answer.best.data) == (2, 1)
    assert answer.compared is not None and "x the best" in comparison(answer.best, answer.compared)


def test_idle_devices_are_counted() -> None:
    answer = ask(devices=5, pipeline=2, tensor=1)
    assert answer.best.idle == 1
    assert any(reason.startswith("1 of 5 devices stay idle") for reason in answer.best.why)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("P=0", "expected NAME=NUMBER"),
        ("Q=2", "expected NAME=NUMBER"),
        ("P=3,D=2", "needs 6 devices, there are 4"),
        ("P=11", "at most 10"),
    ],
)
def test_explain_refuses_what_is_no_layout(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ask(text)
    assert "\n" not in str(caught.value)
