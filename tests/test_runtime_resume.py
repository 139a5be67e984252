"""A checkpoint is the whole state, readable under any layout, and what is exported from it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime_world import call, train

BF16_ODD: dict[str, Any] = {
    "view": "bf16",
    "model": {"attention_dropout": 0.1},
    "clip": 0.5,
    "rungs": "mixed",
}
SAME: dict[str, dict[str, Any]] = {
    "D2-zero0": {"layers": (3,), "data": 2, "zero": 0},
    "D2-zero1": {"layers": (3,), "data": 2, "zero": 1},
    "D2-zero2": {"layers": (3,), "data": 2, "zero": 2},
    "D2-zero3": {"layers": (3,), "data": 2, "zero": 3},
    "P2D2-zero1": {"layers": (2, 1), "data": 2, "zero": 1},
    "P2D2-zero3": {"layers": (2, 1), "data": 2, "zero": 3},
    "P2": {"layers": (2, 1)},
}
# One global batch of 8 sequences under every layout.
LAYOUTS: dict[str, dict[str, Any]] = {
    "D2-zero1": {"layers": (3,), "data": 2, "zero": 1, "microbatches": 2},
    "D2-zero3": {"layers": (3,), "data": 2, "zero": 3, "microbatches": 2, "rungs": "mlp"},
    "P2": {"layers": (2, 1), "microbatches": 4},
    "P1": {"layers": (3,), "microbatches": 4, "rungs": "inputs"},
    "P2D2-zero2": {"layers": (1, 2), "data": 2, "zero": 2, "microbatches": 2},
    "P2D2-zero3": {"layers": (0, 3), "data": 2, "zero": 3, "microbatches": 1, "micro_batch": 4},
    "D4-zero0": {"layers": (3,), "data": 4, "zero": 0, "microbatches": 1},
}


def at(folder: Path, step: int) -> str:
    return str(folder / f"step-{step:08d}")


@pytest.mark.parametrize("name", SAME)
def test_bc19_resumed_is_bitwise_straight(name: str, tmp_path: Path) -> None:
    plan = BF16_ODD | SAME[name]
    straight = train(**plan, steps=6, folder=str(tmp_path), checkpoint_every=3)
    resumed = train(**plan, steps=6, resume=at(tmp_path, 3))
    assert resumed.losses == straight.losses[3:]
    assert resumed.norms == straight.norms[3:]
    assert [m["lr"] for m in resumed.metrics] == [m["lr"] for m in straight.metrics][3:]
    assert resumed.state.keys() == straight.state.keys()
    assert all(resumed.state[n].tobytes() == straight.state[n].tobytes() for n in straight.state)
    assert [r["views"] for r in resumed.ranks] == [r["views"] for r in straight.ranks]
    assert [r["updates"] for r in resumed.ranks] == [r["updates"] for r in straight.ranks]
    assert [r["rule"] for r in resumed.ranks] == [r["rule"] for r in straight.ranks]


def test_saving_changes_nothing(tmp_path: Path) -> None:
    plan = BF16_ODD | SAME["P2D2-zero3"]
    saved = train(**plan, steps=4, folder=str(tmp_path), checkpoint_every=1)
    assert saved.meaning() == train(**plan, steps=4).meaning()


@pytest.mark.parametrize(("writer", "tied"), [("D2-zero1", False), ("P2D2-zero3", True), ("D4-zero0", True)])
def test_bc24_another_layout_goes_on(writer: str, tied: bool, tmp_path: Path) -> None:
    common: dict[str, Any] = {"model": {"tie_word_embeddings": tied}, "clip": 0.5}
    straight = train(**common, **LAYOUTS[writer], steps=6, folder=str(tmp_path), checkpoint_every=3)
    before = train(**common, **LAYOUTS[writer], steps=3)
    for name, plan in LAYOUTS.items():
        resumed = train(**common, **plan, steps=6, resume=at(tmp_path, 3))
        assert resumed.losses == pytest.approx(straight.losses[3:], abs=1e-4), name
        assert [m["step"] for m in resumed.metrics] == [4, 5, 6]
        last = len(plan["layers"]) - 1
        for number in (3, 4, 5):
            expected = straight.microbatches(number, "sample_ids", 0)
            ids = resumed.microbatches(number, "sample_ids", last)
            assert np.concatenate(ids).tolist() == np.concatenate(expected).tolist(), name
        # Loaded state is the saved state: nothing is run between.
        loaded = train(**common, **plan, steps=3, resume=at(tmp_path, 3))
        assert all(loaded.state[n].tobytes() == before.state[n].tobytes() for n in before.state), name


def test_bc03_a_checkpoint_stores_every_element_once(tmp_path: Path) -> None:
    for zero in range(4):
        folder = tmp_path / str(zero)
        found = train(
            model={"tie_word_embeddings": True}, layers=(2, 1), data=2, zero=zero, steps=1, folder=str(folder)
        )
        stretches = call("runtime_plain:stored", checkpoint=at(folder, 1))
        assert stretches.keys() == found.state.keys()
        assert "weight/lm_head.weight" not in stretches
        for name, parts in stretches.items():
            ends = [0, *(offset + length for offset, length in parts)]
            assert [offset for offset, _ in parts] == ends[:-1]
            assert ends[-1] == found.state[name].size


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", [{}, {"architectures": ["Qwen2ForCausalLM"]}], ids=["llama", "qwen2"])
def test_bc22_exports_are_whole(model: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    # hidden = heads x head_dim, because Qwen2's own config knows no other.
    shape = {"hidden_size": 18, "vocab_size": 37, "tie_word_embeddings": tied}
    common = {"model": model | shape, "steps": 2}
    logits = []
    for number, plan in enumerate(("D4-zero0", "D2-zero3", "P2D2-zero3")):
        folder = tmp_path / str(number)
        train(**common, **LAYOUTS[plan], folder=str(folder))
        config = {"model": model | shape, "layers": (3,)}
        found = call(
            "runtime_plain:export_logits", checkpoint=at(folder, 2), folder=str(folder / "hf"), config=config
        )
        assert found["faults"] == {}
        assert found["shapes"] == found["expected"]
        assert all(np.prod(s) > 0 for s in found["shapes"].values())
        total = 4 * sum(int(np.prod(s)) for s in found["shapes"].values())
        assert found["index"]["metadata"]["total_size"] == total
        assert found["index"]["weight_map"].keys() == found["shapes"].keys()
        logits.append(found["logits"])
    for other in logits[1:]:
        assert np.abs(other - logits[0]).max() < 1e-5
