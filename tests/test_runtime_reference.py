"""The same meaning as one plain process, and the same under every plan, up to the order of sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from runtime_world import Array, plain, train

HEAD_DIM_16 = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODEL = HEAD_DIM_16 | {"intermediate_size": 128, "vocab_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": MODEL,
    "llama-tied": MODEL | {"tie_word_embeddings": True},
    # BC-26: the end token, which targets hold, is the padding token too
    "llama-pad-is-end": MODEL | {"pad_token_id": 2, "eos_token_id": 2},
    "qwen2-tied": MODEL | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
}
# One global batch of 12 sequences under every plan.
PLANS: dict[str, dict[str, Any]] = {
    "P1": {"layers": (3,), "microbatches": 1, "micro_batch": 12},
    "P1-M6-mlp": {"layers": (3,), "microbatches": 6, "rungs": "mlp"},
    "P2-uneven": {"layers": (3, 0), "microbatches": 3, "micro_batch": 4, "rungs": "inputs"},
    "D4-zero3": {"layers": (3,), "data": 4, "zero": 3, "microbatches": 3, "micro_batch": 1, "rungs": "mixed"},
    "P2D2-zero1": {"layers": (1, 2), "data": 2, "zero": 1, "microbatches": 3},
    "P2D2-zero2": {"layers": (1, 2), "data": 2, "zero": 2, "microbatches": 3, "rungs": "elementwise"},
    "P2D2-zero0": {"layers": (0, 3), "data": 2, "zero": 0, "microbatches": 3},
    "P3": {"layers": (1, 1, 1), "microbatches": 6, "rungs": "mixed", "ahead": 2},
}


def error(found: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """The largest of all tensors' `|difference| / max(|gradient|, 1e-3 * global norm)`."""
    assert found.keys() == expected.keys()
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in expected.values()))
    size = {n: max(np.linalg.norm(g.astype(np.float64)), 1e-3 * norm) for n, g in expected.items()}
    return max(
        float(np.linalg.norm(found[n].astype(np.float64) - g.astype(np.float64)) / size[n])
        for n, g in expected.items()
    )


@pytest.mark.parametrize(
    ("family", "view", "bound"),
    [
        *((family, "fp32", 1e-5) for family in FAMILIES),
        ("llama", "fp64", 1e-10),
        ("qwen2-tied", "fp64", 1e-10),
    ],
)
def test_first_gradients_are_those_of_a_plain_process(family: str, view: str, bound: float) -> None:
    common = {"model": FAMILIES[family], "view": view, "steps": 1, "clip": 0.5}
    expected = plain(**common, **PLANS["P1"])
    for name, plan in PLANS.items():
        found = train(**common, **plan)
        assert error(found.gradients, expected["gradients"]) < bound, name
        assert found.losses[0] == pytest.approx(expected["losses"][0], rel=bound)
        assert found.norms[0] == pytest.approx(expected["norms"][0], rel=bound)


def test_loss_curves_of_50_steps() -> None:
    # Enough text for some epochs in 50 steps, the last window padded.
    common = {"model": MODEL, "steps": 50, "clip": 1.0, "tokens": 1501, "lr": 1e-3}
    expected = plain(**common, **PLANS["P1"])["losses"]
    assert expected[0] - expected[-1] > 0.5
    for name in ("P1", "P2-uneven", "P2D2-zero1", "D4-zero3", "P3"):
        found = train(**common, **PLANS[name]).losses
        assert np.abs(np.array(found) - expected).max() < 1e-4, name


def test_bc02_the_norm_does_not_depend_on_how_a_batch_is_cut() -> None:
    cuts = [
        {"layers": (3,), "microbatches": 1, "micro_batch": 16},
        {"layers": (2, 1), "microbatches": 2, "micro_batch": 8},
        {"layers": (2, 1), "microbatches": 8, "micro_batch": 2},
        *(
            {"layers": (2, 1), "data": 2, "zero": zero, "microbatches": 4, "micro_batch": 2}
            for zero in range(4)
        ),
    ]
    norms = [train(model=MODEL, lr=0.0, steps=2, **cut).norms for cut in cuts]
    for found in norms[1:]:
        assert found == pytest.approx(norms[0], rel=1e-5)


def test_bc03_a_tied_matrix_is_one_matrix() -> None:
    tied = {"model": MODEL | {"tie_word_embeddings": True}, "steps": 5, "clip": 0.5}
    alone = train(**tied, layers=(3,), microbatches=4)
    for zero in range(4):
        found = train(**tied, layers=(2, 1), data=2, zero=zero, microbatches=2)
        for replica in (0, 1):
            first, last = (
                next(r for r in found.ranks if (r["stage"], r["replica"]) == (s, replica)) for s in (0, 1)
            )
            assert len(first["tied"]) == 5
            assert first["tied"] == last["tied"]
            assert first["views"]["tied"] == last["views"]["tied"]
        assert error(found.gradients, alone.gradients) < 1e-5
        assert found.norms == pytest.approx(alone.norms, rel=1e-4)


@pytest.mark.parametrize("zero", range(4))
def test_bc03_a_tied_matrix_counts_once_in_the_norm(zero: int) -> None:
    rows, columns = 37, 15
    value = float(np.sqrt(800 / (rows * columns)))
    model = {"tie_word_embeddings": True}
    # Its whole gradient: half from either stage, on each of two replicas.
    found = train(
        model=model,
        layers=(2, 1),
        data=2,
        zero=zero,
        microbatches=1,
        steps=1,
        wreck=([0], None, {"tied": value / 4}),
    )
    assert found.norms == [pytest.approx(np.sqrt(800), rel=1e-6)]
    alone = train(model=model, microbatches=1, steps=1, wreck=([0], None, {"tied": value}))
    assert alone.norms == [pytest.approx(np.sqrt(800), rel=1e-6)]


@pytest.mark.parametrize("layers", [(5,), (3, 2), (2, 3), (5, 0), (1, 3, 1)])
def test_bc04_no_layer_vanishes(layers: tuple[int, ...]) -> None:
    found = train(layers=layers, steps=1)
    alone = train(layers=(5,), steps=1)
    assert {name: w.size for name, w in found.weights.items()} == {
        n: w.size for n, w in alone.weights.items()
    }
    assert sum(name.endswith("q_proj.weight") for name in found.weights) == 5
    assert error(found.gradients, alone.gradients) < 1e-5  # every one of them learns


def test_bc26_a_real_end_token_counts_though_padding_looks_alike() -> None:
    document: dict[str, Any] = {
        "tokens": [5, 6, 2],
        "seq_len": 6,
        "model": {"pad_token_id": 2, "eos_token_id": 2},
    }
    common = document | {"microbatches": 1, "micro_batch": 1, "steps": 2}
    found = train(**common)
    assert [m["target_tokens"] for m in found.metrics] == [2, 2]  # 6 and the real 2; three pads ignored
    assert found.losses == pytest.approx(plain(**common)["losses"], rel=1e-6)


@pytest.mark.parametrize("passes", [(), None])
def test_bc07_every_micro_batch_meets_its_own_targets(passes: tuple[str, ...] | None) -> None:
    # Every window repeats one token, so that losses tell micro-batches apart.
    tokens = np.repeat(np.arange(37), 12).tolist() * 3
    common: dict[str, Any] = {"tokens": tokens, "steps": 2, "eval_every": 1, "micro_batch": 1, "lr": 0.03}
    if passes is not None:
        common["passes"] = passes
    alone = train(**common, layers=(3,), microbatches=8)
    plans: list[dict[str, Any]] = [
        {"layers": (2, 1), "microbatches": 8},
        {"layers": (1, 1, 1), "microbatches": 8, "rungs": "inputs"},
        {"layers": (2, 1), "data": 2, "microbatches": 4},
    ]
    for plan in plans:
        found = train(**common, **plan)
        last = len(plan["layers"]) - 1
        for number, training in ((0, True), (0, False), (1, True), (1, False)):
            losses = found.microbatches(number, "losses", last, training)
            expected = alone.microbatches(number, "losses", 0, training)
            assert losses == pytest.approx(expected, abs=1e-5)
            assert len(losses) == (8 if training else 16)  # two evaluations
            assert max(losses) - min(losses) > 1e-3
            ids = found.microbatches(number, "sample_ids", 0, training)
            assert ids == found.microbatches(number, "sample_ids", last, training)
            assert ids == alone.microbatches(number, "sample_ids", 0, training)


@pytest.mark.parametrize("zero", range(4))
def test_bc28_a_rank_or_micro_batch_without_targets(zero: int) -> None:
    masked = {0: (4, 5, 6, 7), 1: (0, 1), 2: (2, 3, 4, 5, 6, 7)}  # a rank; a micro-batch; all but one
    common = {"masked": masked, "clip": 0.5, "view": "fp64"}
    expected = plain(**common, microbatches=1, micro_batch=8)
    found = train(**common, layers=(2, 1), data=2, zero=zero, microbatches=2)
    assert found.losses == pytest.approx(expected["losses"], rel=1e-10)
    assert found.norms == pytest.approx(expected["norms"], rel=1e-10)
    assert error(found.weights, {n: expected["weights"][n] for n in found.weights}) < 1e-8


def test_bc28_a_global_batch_without_targets_is_skipped() -> None:
    plan: dict[str, Any] = {"layers": (2, 1), "data": 2, "zero": 2, "clip": 0.5}
    two = train(**plan, steps=2)
    nothing = train(**plan, steps=3, masked={2: tuple(range(8))})
    assert nothing.state.keys() == two.state.keys()
    assert all(nothing.state[n].tobytes() == two.state[n].tobytes() for n in two.state)
    assert nothing.metrics[2]["skipped"] and nothing.metrics[2]["reason"] == "no target tokens"
    assert "no target tokens" in " ".join(nothing.ranks[0]["notes"])
    # One in the middle: deferred work is done, the schedule stands still, and training goes on.
    middle = train(**plan, steps=4, masked={1: tuple(range(8))})
    baseline = train(**plan, steps=4, masked={1: tuple(range(8))}, passes=())
    assert middle.state.keys() == baseline.state.keys()
    assert all(middle.state[n].tobytes() == baseline.state[n].tobytes() for n in middle.state)
    assert [r["rule"]["applied"] for r in middle.ranks] == [3] * 4
