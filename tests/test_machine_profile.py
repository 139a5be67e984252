"""Profiles: file round trip and refusals; the measuring functions on a tiny model and two processes."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratrain.errors import UserError
from ratrain.machine.profile import BlockTime, Communication, Origin, Profile, load_profile

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
PROFILE = Profile(
    origin=Origin("2026-01-01T00:00:00+00:00", "host", "cpu", 2, 1, "2.13.0", 2),
    models={"tiny": CONFIG},
    blocks=(BlockTime("tiny", "layer0", "inputs", 1, 16, "fp32", 1e-3, 1e-3, 2e-3),),
    optimizer_rate=1e8,
    norm_rate=1e9,
    runtime_base_memory=4e8,
    communications=(Communication("all_gather", 2, ((4e3, 1e-4), (1e6, 1e-3))),),
    slowdown_under_communication=1.2,
    drag_under_compute=1.5,
)


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert load_profile(path) == PROFILE
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=99), "not of version 2"),
        (lambda c: c.update(optimiser_rate=1), "did you mean 'optimizer_rate'"),
        (lambda c: c.pop("blocks"), "blocks is missing"),
        (lambda c: c["blocks"][0].update(forward="fast"), "blocks[0], forward: expected number"),
        (lambda c: c["blocks"][0].update(micro_batch=1.5), "micro_batch: expected int"),
        (lambda c: c["blocks"][0].update(backward=-1), "at least 0"),
        (lambda c: c["blocks"][0].update(model="other"), "'other'"),
        (lambda c: c.update(slowdown_under_communication=0.5), "at least 1"),
        (lambda c: c.update(drag_under_compute=0.5), "at least 1"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        load_profile(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_or_broken_file_and_missing_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make one with ratrain profile"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"version": 1,')
    with pytest.raises(UserError, match="not JSON"):
        load_profile(tmp_path / "half.json")
    with pytest.raises(UserError, match="cannot write"):
        PROFILE.save(tmp_path / "absent" / "profile.json")
    assert PROFILE.communication("all_gather", 2).alpha == 1e-4
    with pytest.raises(UserError, match="measured: all_gather of 2"):
        PROFILE.communication("all_gather", 4)


def test_transfers_lie_on_the_measured_curve() -> None:
    measured = Communication("p2p", 2, ((1e3, 1e-4), (1e5, 2e-4), (1e6, 2e-2)))
    assert [measured.seconds(size) for size in (10, 1e3, 1e5, 1e6)] == [1e-4, 1e-4, 2e-4, 2e-2]
    assert measured.seconds(5.5e5) == pytest.approx(1.01e-2)
    assert measured.seconds(3e6) == pytest.approx(6e-2)
    with pytest.raises(UserError, match="sizes growing"):
        Communication("p2p", 2, ((1e5, 1e-4), (1e3, 2e-4)))


def test_blocks_of_a_tiny_model_are_measured_on_every_rung() -> None:
    from ratrain.machine.measure import measure_blocks, measure_optimizer, origin
    from ratrain.model.spec import ModelSpec

    times = measure_blocks(ModelSpec.from_dict(CONFIG), "tiny", (1, 2), 16, rounds=2)
    assert {(t.block, t.rung) for t in times} == {
        ("embed", "keep"),
        ("head", "keep"),
        *(("layer0", rung) for rung in ("keep", "elementwise", "mlp", "inputs")),
    }
    assert all(t.forward > 0 and t.backward > 0 for t in times)
    assert all((t.recover > 0) == (t.rung != "keep") for t in times)
    rate, norm_rate = measure_optimizer(rounds=2)
    replace(PROFILE, origin=origin(), blocks=times, optimizer_rate=rate, norm_rate=norm_rate)


def _rank(rank: int, rendezvous: str, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    from ratrain.machine.measure_links import measure_interference, measure_links

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    found = measure_links((2,), sizes=(4_096, 262_144), rounds=2)
    answers.put((found, measure_interference(lambda: sum(range(10_000)), 100_000, rounds=2)))
    dist.barrier()
    dist.destroy_process_group()


def test_links_between_two_processes_are_measured_alike_on_both(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, str(tmp_path / "store"), answers)) for r in range(2)]
    for process in ranks:
        process.start()
    first, second = (answers.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(timeout=30)
    assert first == second
    communications, (slowdown, drag) = first
    assert [c.kind for c in communications] == ["p2p", "reduce_scatter", "all_gather", "all_reduce"]
    assert all(c.seconds(1e6) < 1 and c.alpha > 0 for c in communications)
    assert slowdown >= 1 and drag >= 1
