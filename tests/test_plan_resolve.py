"""From configuration to plan: what is checked, and the one line that a wrong setting gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratrain.config import Config, parse_config
from ratrain.errors import UserError
from ratrain.plan.placement import even_layers
from ratrain.plan.request import read_request, resolve_policy
from ratrain.plan.resolve import compute_of, resolve
from test_plan_plan import tiny_spec


def config(**sections: Any) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"config": "config.json"},
        "data": {"corpus": "text", "seq_len": 64},
        "train": {"global_batch": 8, "micro_batch": 1},
        "parallel": {"pipeline": 2, "data": 2, "zero": 1, "layers": [2, 2]},
        "recovery": {"policy": "keep"},
        "machine": {"memory": "4 GB"},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return parse_config(base, "run.toml")


def refuse(message: str, devices: int | None = None, spec: Any = None, **sections: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve(config(**sections), spec or tiny_spec(), devices=devices)
    assert "\n" not in str(caught.value)


def test_explicit_layout_is_taken_as_it_is() -> None:
    plan = resolve(config(recovery={"policy": "inputs", "ahead": 2, "elide": False}), tiny_spec(), devices=4)
    assert (plan.layers, plan.data, plan.zero, plan.micro_batches) == ((2, 2), 2, 1, 4)
    assert (plan.ahead, plan.elide, plan.gated) == (2, False, True)
    assert plan.rungs == (("keep", "inputs", "inputs"), ("inputs", "inputs", "keep"))
    assert plan.forecast is not None and len(plan.forecast.memory) == 2


def test_precision_auto() -> None:
    for view, grad in {"fp32": "fp32", "bf16": "fp32", "fp16": "fp16", "fp64": "fp64"}.items():
        plan = resolve(config(precision={"view": view}, train={"clip": 0.0}), tiny_spec())
        assert (plan.grad, plan.reduce) == (grad, grad)
        assert plan.gated == (view == "fp16")


def test_thirty_layers_on_four_stages_lose_none() -> None:
    """BC-04."""
    plan = resolve(
        config(parallel={"pipeline": 4, "data": 1, "layers": "auto"}), tiny_spec(num_hidden_layers=30)
    )
    assert sum(plan.layers) == 30
    blocks = [b for stage in plan.layout().stages for b in stage if b.startswith("layer")]
    assert blocks == [f"layer{i}" for i in range(30)]


def test_even_layers() -> None:
    assert even_layers(4, 30) == (8, 8, 7, 7)
    assert even_layers(5, 4) == (1, 1, 1, 1, 0)
    assert even_layers(6, 4) == (0, 1, 1, 1, 1, 0)
    assert even_layers(1, 4) == (4,)


def test_policy_table() -> None:
    rungs = resolve_policy({"default": "mlp", "stage1": "inputs", "layer3": "keep"}, (2, 2))
    assert rungs == (("keep", "mlp", "mlp"), ("inputs", "keep", "keep"))
    refuse("no block or stage 'layer9'", recovery={"policy": {"layer9": "keep"}})
    refuse("policy.stage0 = 'input'", recovery={"policy": {"stage0": "input"}})


def test_what_does_not_divide_or_add_up() -> None:
    refuse(r"\[2, 3\] adds up to 5, but the model has 4", parallel={"layers": [2, 3]})
    refuse("2 entries, but parallel.pipeline is 4", parallel={"pipeline": 4, "data": 1})
    refuse("stage 1 would be empty", parallel={"pipeline": 3, "data": 1, "layers": [2, 0, 2]})
    refuse("at most 6", parallel={"pipeline": 7, "data": 1, "layers": "auto"})
    refuse("global_batch 8 is not a multiple of 6", train={"micro_batch": 3})
    refuse("2 x parallel.data 2 are 4 processes, but there are 3", devices=3)
    refuse("parallel.tensor 3 does not divide", parallel={"tensor": 3}, devices=12)
    refuse("unknown pass 'layerwise'", run={"passes": ["layerwise"]})


def test_budget_names_rank_need_and_the_smallest_that_would_do() -> None:
    refuse("stage . \\(rank [02]\\) needs .* of 100.00 MB; runtime 38", machine={"memory": "100 MB"})
    with pytest.raises(UserError) as caught:
        resolve(config(machine={"memory": "100 MB"}), tiny_spec())
    smallest = str(caught.value).rsplit("is ", 1)[1]
    assert resolve(config(machine={"memory": smallest}), tiny_spec())


def test_auto_takes_what_fits() -> None:
    auto = {"pipeline": "auto", "data": "auto", "zero": "auto", "layers": "auto"}
    plan = resolve(config(parallel=auto, recovery={"policy": "auto"}), tiny_spec(), devices=4)
    assert plan.ranks == 4
    refuse("no layout of 4 devices fits 1.00 MB each", 4, None, parallel=auto, machine={"memory": "1 MB"})


def test_more_processes_than_cores_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(cores: int, devices: int) -> float:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
        request = read_request(config(machine={"platform": "local"}), tiny_spec(), devices)
        return compute_of(request).block(tiny_spec(), "layer0", 1, 64).forward

    assert forward(2, 4) == pytest.approx(2 * forward(4, 4)) == pytest.approx(2 * forward(8, 4))


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    model = tmp_path / "config.json"
    model.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    code = (
        "import sys, ratrain.plan.resolve; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numba')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
