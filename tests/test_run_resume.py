"""A run that is stopped, goes on, runs beside another, or is asked to go on from what does not fit."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratrain.cli import main
from ratrain.report.trace import read_trace
from run_samples import Trained, column, gone, own_lines, running, write_corpus, write_model

pytestmark = pytest.mark.timeout(280)


def weights(checkpoint: Path) -> dict[str, Any]:
    """Name to tensor, by name and kind of state."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from ratrain.runtime.checkpoint import FlatShard

    reader = dcp.FileSystemReader(checkpoint)
    found: dict[str, Any] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        found[key] = torch.empty(stored.size.numel(), dtype=stored.properties.dtype)
    shards = {key: FlatShard.of(flat, flat.numel(), 0) for key, flat in found.items()}
    dcp.load(shards, storage_reader=reader, no_dist=True)
    return found


def same_run(one: Path, other: Path) -> None:
    """Losses, norms, evaluations and the whole last state, bit for bit."""
    import torch

    for key in ("loss", "grad_norm", "lr", "eval_loss"):
        assert column(one, key) == column(other, key), key
    left, right = (weights(run / "checkpoints" / "step-00000008") for run in (one, other))
    assert left.keys() == right.keys() and {key.split("/")[0] for key in left} == {"weight", "m", "v"}
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


@pytest.fixture(scope="module")
def stopped(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, sent SIGTERM in its first steps: its communications take longer, its values are equal."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with running("train", trained.toml, "--out", out, "--set", "run.delay=0.3") as run:
        run.wait_for(r"^step 1/8")
        workers = run.workers()
        titles = {rank: " ".join(child.cmdline()) for rank, child in workers.items()}
        run.process.send_signal(signal.SIGTERM)
        status, said, err = run.end(200)
    assert sorted(workers) == [0, 1, 2, 3], "workers are direct children that carry their rank"
    for rank, title in titles.items():
        assert f"rank {rank}/4 (stage {rank // 2}, replica {rank % 2})" in title
    assert status == 0 and own_lines(err) == [], err
    assert "stopped as asked: saved" in said
    assert gone(list(workers.values()))
    return out


def test_sigterm_saves_between_checkpoints(stopped: Path) -> None:
    steps = column(stopped, "step")
    newest = max((stopped / "checkpoints").iterdir()).name
    assert 1 <= max(steps) < 8 and newest == f"step-{max(steps):08}"
    assert not list(stopped.rglob("*partial*"))
    assert (stopped / "report.html").exists()


def test_two_runs_at_once_one_goes_on_and_one_runs_without_passes(
    trained: Trained, stopped: Path, tmp_path: Path
) -> None:
    """Both with default ports, on one host, and both like the run that was alone and never stopped."""
    done = max(column(stopped, "step"))
    plain = tmp_path / "plain"
    with (
        running("train", trained.toml, "--out", stopped) as on,
        running("train", trained.toml, "--out", plain, "--passes", "none") as beside,
    ):
        for run in (on, beside):
            status, said, err = run.end(250)
            assert status == 0, err
            if run is on:
                assert re.search(rf"^resuming from .*/step-{done:08}$", said, re.M)
                assert re.search(rf"^resumed from .* at step {done} \(written by P=2 D=2 ZeRO-1", said, re.M)
    same_run(trained.run, stopped)
    same_run(trained.run, plain)
    lags = {
        run: {row.action.lag for row in read_trace(run / "trace.json").rows} for run in (trained.run, plain)
    }
    assert lags == {trained.run: {0, 1}, plain: {0}}


def test_a_finished_run_starts_no_workers(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(trained.run, tmp_path / "run")
    before = {p: p.read_bytes() for p in (copy / "checkpoints").rglob("*") if p.is_file()}
    monkeypatch.setattr("ratrain.runtime.launch.launch", lambda *rest, **more: pytest.fail("started"))
    assert main(["train", str(trained.toml), "--out", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "step 8 of 8 is reached: nothing to train; raise train.steps" in out
    assert before == {p: p.read_bytes() for p in (copy / "checkpoints").rglob("*") if p.is_file()}
    assert column(copy, "loss") == column(trained.run, "loss")


class Resuming:
    """`ratrain train --resume` on a copy of the trained run, up to the start of the workers."""

    def __init__(
        self, trained: Trained, folder: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
    ) -> None:
        self.toml, self.capsys = trained.toml, capsys
        self.run = shutil.copytree(trained.run, folder / "run")
        self.newest = self.run / "checkpoints" / "step-00000008"
        patch.setattr("ratrain.runtime.launch.launch", lambda *rest, **more: 0)

    def call(self, *settings: str, resume: str | Path = "auto") -> tuple[int, str, str]:
        overrides = [part for setting in settings for part in ("--set", setting)]
        arguments = ["train", self.toml, "--out", self.run, "--resume", resume, *overrides]
        return main([str(a) for a in arguments]), *self.capsys.readouterr()

    def refused(self, *settings: str, resume: str | Path = "auto") -> str:
        before = {p: p.read_bytes() for p in self.run.rglob("*") if p.is_file()}
        status, out, err = self.call(*settings, resume=resume)
        assert status == 2 and out == "" and err.count("\n") == 1, (out, err)
        assert {p: p.read_bytes() for p in self.run.rglob("*") if p.is_file()} == before
        return err

    def accepted(self, *settings: str, resume: str | Path = "auto") -> str:
        status, out, err = self.call("train.steps=12", *settings, resume=resume)
        assert status == 0, err
        return out


@pytest.fixture
def resuming(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Resuming:
    return Resuming(trained, tmp_path, capsys, monkeypatch)


def test_auto_takes_the_newest_complete_one_and_says_which(resuming: Resuming) -> None:
    assert f"resuming from {resuming.newest}\n" in resuming.accepted()
    (resuming.newest / "manifest.json").unlink()  # as if its writing had been cut off
    assert "step-00000006\n" in resuming.accepted()
    resuming.newest.rename(resuming.newest.with_suffix(".partial"))
    assert "step-00000006\n" in resuming.accepted()
    assert "resuming" not in resuming.accepted(resume="never")
    shutil.rmtree(resuming.run / "checkpoints")
    assert "resuming" not in resuming.accepted()


def test_another_layout_may_go_on(resuming: Resuming) -> None:
    other = ("parallel.pipeline=4", "parallel.data=1", "parallel.zero=0")
    assert "resuming from" in resuming.accepted(*other)


@pytest.mark.parametrize("how", ["auto", "path"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.global_batch=16", "written with train.global_batch = 8, this run has 16"),
        ("data.seq_len=32", "written with data.seq_len = 16, this run has 32"),
        ("train.seed=1", "written with train.seed = 0, this run has 1"),
        ("data.corpus=OTHER", "written with corpus checksum = "),
        ("model.config=OTHER", "model.layers.0.mlp.gate_proj.weight is [64, 32] there, [96, 32] in"),
        ("model.config=DEEPER", "model.layers.4."),
    ],
)
def test_a_checkpoint_of_something_else(
    resuming: Resuming, tmp_path: Path, how: str, setting: str, said: str
) -> None:
    other = {
        "data.corpus=OTHER": lambda: write_corpus(tmp_path / "corpus", seed=8),
        "model.config=OTHER": lambda: write_model(tmp_path / "model", intermediate_size=96),
        "model.config=DEEPER": lambda: write_model(tmp_path / "model", num_hidden_layers=5),
    }
    if setting in other:
        setting = f"{setting.split('=')[0]}={other[setting]()}"
    line = resuming.refused(setting, resume="auto" if how == "auto" else resuming.newest)
    assert said in line and str(resuming.newest) in line


def test_a_damaged_checkpoint(resuming: Resuming, tmp_path: Path) -> None:
    newest = resuming.newest
    assert "/nowhere: not a checkpoint" in resuming.refused(resume="/nowhere")
    assert "not a checkpoint (no manifest.json)" in resuming.refused(resume=resuming.run)
    manifest = (newest / "manifest.json").read_text()
    for content, said in (
        (manifest[:50], "manifest.json cannot be read"),
        ("[]", "manifest.json cannot be read"),
        ("{}", "checkpoint version None, expected 1"),
        (json.dumps(json.loads(manifest) | {"version": 99}), "checkpoint version 99, expected 1"),
    ):
        (newest / "manifest.json").write_text(content)
        assert said in resuming.refused()
    (newest / "manifest.json").write_text(manifest)
    for piece in (next(newest.glob("*.distcp")), newest / ".metadata"):
        whole = piece.read_bytes()
        piece.write_bytes(whole[:-10])
        line = resuming.refused()
        assert f"{piece} has {len(whole) - 10} bytes of {len(whole)}: the checkpoint is damaged" in line
        piece.unlink()
        assert f"{piece} is missing" in resuming.refused()
        piece.write_bytes(whole)
    resuming.accepted()
    # An older one may be named while the newest is damaged.
    (newest / ".metadata").unlink()
    assert "step-00000006" in resuming.accepted(resume=resuming.run / "checkpoints" / "step-00000006")


def test_this_process_has_no_children_left() -> None:
    left = [c for c in psutil.Process().children(recursive=True) if "ratrain train" in " ".join(c.cmdline())]
    assert left == []
