"""The wall-clock part of the reproduction: runs that must agree do, and emulated devices take what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratrain import measured
from ratrain.errors import UserError
from ratrain.machine.emulated import EmulatedDevice
from ratrain.machine.profile import Communication, Origin, Profile
from ratrain.plan.compute import Compute
from ratrain.plan.reproduce.curves import Curves
from ratrain.report.reproduction_figures import losses
from run_samples import MODEL, write_corpus

HOST = Profile(
    Origin("now", "here", "cpu", 2, 1, "2", 2), {}, (), 1.0, 2e9, 1e8,
    (Communication("p2p", 2, ((4096.0, 1e-3),)),), 1.3, 1.2,
)  # fmt: skip


def test_an_emulated_device_has_its_own_times_and_the_hosts_links() -> None:
    device = EmulatedDevice(embed=(1.0, 2.0), layer=(3.0, 4.0), head=(5.0, 6.0), optimizer_rate=7.0)
    profile = device.profile(HOST, MODEL, 16)
    compute = Compute(profile, "fp32")
    from ratrain.model.spec import ModelSpec

    spec = ModelSpec.from_dict(MODEL)
    for block, times in (("embed", (1.0, 2.0)), ("layer2", (3.0, 4.0)), ("head", (5.0, 6.0))):
        found = compute.block(spec, block, 2, 16)
        assert (found.forward, found.backward) == pytest.approx((2 * times[0], 2 * times[1]))
    assert compute.block(spec, "layer0", 1, 16).recover["inputs"] == 3.0
    assert compute.update(14) == 2.0
    assert profile.communications == HOST.communications and profile.norm_rate == HOST.norm_rate
    assert profile.slowdown_under_communication == profile.drag_under_compute == 1.0


def test_curves_are_held_against_the_first() -> None:
    curves = Curves({"a": (2.0, 4.0), "b": (2.0, 5.0), "c": (2.0, 4.0)})
    assert curves.deviation("b") == (0.0, 0.25)
    assert losses(curves).startswith(b"\x89PNG")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The correctness runs on a corpus of a few kilobytes."""
    data = {**measured._TRAINED["data"], "corpus": str(write_corpus(tmp_path / "corpus")), "seq_len": 32}
    train = {**measured._TRAINED["train"], "global_batch": 16, "micro_batch": 2}
    monkeypatch.setattr(measured, "_TRAINED", {**measured._TRAINED, "data": data, "train": train})
    monkeypatch.setattr(measured, "_SMALL", {**measured._SMALL, "vocab_size": 300})
    return tmp_path / "out" / "correctness"


def test_passes_change_nothing_and_a_plain_process_agrees(small: Path) -> None:
    told: list[str] = []
    table, curves = measured.correctness(small, 1500, told.append)
    ours = {(cell.row, cell.quantity): cell.ours for cell in table.cells}
    assert all(len(run) == 3 for run in curves.losses.values())
    assert ours["all passes against baseline-1f1b", "loss deviation, largest"] == 0.0
    plain = ours["plain process against baseline-1f1b", "loss deviation, largest"]
    assert plain is not None and plain < 1e-4
    assert "are equal" in table.words[1]


def test_a_run_that_fails_says_why(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_TRAINED", {**measured._TRAINED, "machine": {"memory": "1 MB"}})
    with pytest.raises(UserError, match=r"a measured run failed: .* needs "):
        measured.correctness(small, 1500, lambda text: None)
