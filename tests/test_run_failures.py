"""A rank that dies, hangs or finds no space: all end, one line says why, and what was saved stays whole."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ratrain.runtime.manifest import complete, read_manifest
from run_samples import Ratrain, gone, own_lines, running, write_model, write_run

pytestmark = pytest.mark.timeout(280)

ENDLESS = {"train__steps": 100_000, "eval__every": 0, "train__checkpoint_every": 1, "parallel__data": 1}


def ends_within_30_s(run: Ratrain, victim: int, number: signal.Signals) -> str:
    """The line that names the cause after `victim` got a signal."""
    workers = run.workers()
    assert sorted(workers) == [0, 1]
    begun = time.monotonic()
    workers[victim].send_signal(number)
    status, _, err = run.end(60)
    assert time.monotonic() - begun < 30
    assert status != 0
    assert gone(list(workers.values()))
    lines = own_lines(err)
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def test_a_killed_worker_of_five_layers_on_two_stages(tmp_path: Path) -> None:
    """Also: the odd layer is on exactly one stage, and the checkpoint holds every parameter once."""
    model = write_model(tmp_path / "five", num_hidden_layers=5)
    with running("train", write_run(tmp_path, **ENDLESS, model__config=str(model))) as run:
        run.wait_for(r"step 2: saved")
        assert re.search(r"rank 1 .*was killed by SIGKILL", ends_within_30_s(run, 1, signal.SIGKILL))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["layers"] == [3, 2]
    found = complete(tmp_path / "run" / "checkpoints")
    assert found
    shapes = read_manifest(found[-1]).shapes
    assert {name.split(".")[2] for name in shapes if ".layers." in name} == {"0", "1", "2", "3", "4"}


def test_a_stopped_worker_with_default_time_outs(tmp_path: Path) -> None:
    with running("train", write_run(tmp_path, **ENDLESS)) as run:
        run.wait_for(r"^step 1/")
        line = ends_within_30_s(run, 0, signal.SIGSTOP)
        assert re.search(r"rank 0 .*has not answered for \d+ s", line), line


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_no_space_left_for_a_checkpoint_keeps_the_one_before(tmp_path: Path) -> None:
    """One checkpoint is kept; the disk holds one and a half, so the second fails, and the first stays."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1100k", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        toml = write_run(tmp_path, **ENDLESS | {"train__keep_checkpoints": 1, "run__out": str(disk / "run")})
        with running("train", toml) as run:
            status, out, err = run.end(200)
        assert status != 0 and "step 1: saved" in out
        lines = own_lines(err)
        assert len(lines) == 1 and "no space left for a checkpoint; free some or set run.out" in lines[0], err
        assert "Traceback" not in err
        left = sorted(p.name for p in (disk / "run" / "checkpoints").iterdir())
        assert left == ["step-00000001"]
        assert read_manifest(disk / "run" / "checkpoints" / left[0]).step == 1
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
