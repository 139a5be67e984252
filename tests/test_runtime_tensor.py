"""Tensor ranks: the meaning of one process, bitwise equal under every set of passes, and whole checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime_matrix import SEQUENCE
from runtime_world import ALL, Refused, call, plain, train
from test_runtime_equality import assert_leaves_nothing, assert_ran_its_program, assert_same
from test_runtime_reference import MODEL, error

UNEVEN = MODEL | {"vocab_size": 253}
"""The last tensor rank's part of the vocabulary ends early."""
QWEN2 = MODEL | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
TIED = UNEVEN | {"tie_word_embeddings": True}
MISTRAL = MODEL | {"architectures": ["MistralForCausalLM"], "sliding_window": 8}
BIASED = UNEVEN | {"attention_bias": True, "mlp_bias": True}
PADDED = MODEL | {"pad_token_id": 2, "eos_token_id": 2}
# One global batch of 12 sequences under every plan.
PLANS: dict[str, dict[str, Any]] = {
    "T2": {"tensor": 2, "microbatches": 3, "micro_batch": 4},
    "T2-mixed": {"tensor": 2, "microbatches": 6, "rungs": "mixed", "elide": False},
    "P2T2": {"tensor": 2, "layers": (1, 2), "microbatches": 6, "rungs": "inputs"},
    "D2T2-zero2": {"tensor": 2, "data": 2, "zero": 2, "microbatches": 3},
    "D2T2-zero3": {"tensor": 2, "data": 2, "zero": 3, "microbatches": 3, "rungs": "inputs", "elide": False},
    "D2T2-zero0": {"tensor": 2, "data": 2, "zero": 0, "microbatches": 3},
}
EQUAL: dict[str, dict[str, Any]] = {
    "P2T2": {"tensor": 2, "layers": (1, 2), "microbatches": 4, "rungs": "inputs", "clip": 0.5, "ahead": 2},
    "D2T2-zero1-bf16": {"tensor": 2, "data": 2, "rungs": "mixed", "view": "bf16", "elide": False},
    "D2T2-zero3": {"tensor": 2, "data": 2, "zero": 3, "rungs": "inputs", "clip": 0.5, "elide": False},
    "P2T2-grouped": {"tensor": 2, "layers": (2, 1), "microbatches": 4, "grouped": 2, "clip": 0.5},
}


@pytest.mark.parametrize(
    ("model", "view", "bound"),
    [
        (UNEVEN, "fp32", 1e-5),
        (QWEN2, "fp32", 1e-5),
        (PADDED, "fp32", 1e-5),
        (BIASED, "fp32", 1e-5),
        (TIED, "fp32", 1e-5),
        (MISTRAL, "fp32", 1e-5),
        (UNEVEN, "fp64", 1e-10),
        (QWEN2, "fp64", 1e-10),
    ],
    ids=[
        "llama",
        "qwen2-tied",
        "llama-pad-is-end",
        "llama-biased",
        "llama-tied",
        "mistral",
        "llama-fp64",
        "qwen2-tied-fp64",
    ],
)
def test_first_gradients_are_those_of_a_plain_process(model: Any, view: str, bound: float) -> None:
    common = {"model": model, "view": view, "steps": 1, "clip": 0.5}
    expected = plain(**common, microbatches=1, micro_batch=12)
    for name, plan in PLANS.items():
        found = train(**common, **plan)
        assert error(found.gradients, expected["gradients"]) < bound, name
        assert found.losses[0] == pytest.approx(expected["losses"][0], rel=bound)
        assert found.norms[0] == pytest.approx(expected["norms"][0], rel=bound)


@pytest.mark.parametrize("model", [MODEL, BIASED], ids=["llama", "llama-biased"])
def test_loss_curves_of_50_steps(model: Any) -> None:
    # Biases start as zeros: only training shows whether they are added once.
    common = {"model": model, "steps": 50, "clip": 1.0, "tokens": 1501, "lr": 1e-3}
    expected = plain(**common, microbatches=1, micro_batch=12)["losses"]
    for name in ("T2", "P2T2"):
        assert np.abs(np.array(train(**common, **PLANS[name]).losses) - expected).max() < 1e-4, name


@pytest.mark.parametrize("name", EQUAL)
def test_passes_change_nothing(name: str) -> None:
    plan = SEQUENCE | {"model": UNEVEN} | EQUAL[name]
    none = train(**plan, passes=())
    assert len(none.losses) == 3 and len(none.evaluations) == 2
    for number, passes in enumerate((ALL, ("layerwise_sync", "forward_side_recovery"))):
        # Late messages: were recovery to float, tensor ranks would recover at different moments.
        found = train(**plan, passes=passes, delay=0.02 * (number == 0), delay_seed=1)
        assert_same(found, none)
        assert_leaves_nothing(found)
        assert_ran_its_program(found)


def test_resumed_is_bitwise_straight_and_other_tensor_ranks_are_refused(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"model": UNEVEN, "tensor": 2, "data": 2, "microbatches": 2, "clip": 0.5}
    straight = train(**plan, steps=6, folder=str(tmp_path), checkpoint_every=3)
    at_three = str(tmp_path / "step-00000003")
    resumed = train(**plan, steps=6, resume=at_three)
    assert resumed.losses == straight.losses[3:]
    assert all(resumed.state[n].tobytes() == straight.state[n].tobytes() for n in straight.state)
    # Another pipeline and ZeRO level with as many tensor ranks.
    other = plan | {"layers": (1, 2), "data": 1, "microbatches": 4}
    assert train(**other, steps=6, resume=at_three).losses == pytest.approx(straight.losses[3:], rel=1e-5)
    with pytest.raises(Refused, match="cannot be read"):
        train(**plan | {"tensor": 1}, steps=6, resume=at_three)


def test_an_export_is_whole(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"model": UNEVEN, "tensor": 2, "layers": (2, 1), "steps": 2}
    found = train(**plan, folder=str(tmp_path / "checkpoints"))
    config = found.config["model"]
    told = call(
        "runtime_plain:export_logits",
        config=dict(found.config),
        folder=str(tmp_path / "export"),
        checkpoint=str(tmp_path / "checkpoints/step-00000002"),
    )
    assert config and not told["faults"] and told["shapes"] == told["expected"]
