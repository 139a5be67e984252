"""Through the command line: killed, resumed, and beside a second run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ratrain.data.store import write_store
from runtime_jobs import ODD_MODEL
from runtime_world import call

RUN = """
[model]
config = "{folder}/config.json"

[data]
corpus = "{folder}/tokens"
seq_len = 16

[train]
steps = 6
global_batch = 8
micro_batch = 2
lr = 3e-3
warmup_steps = 2
checkpoint_every = 3

[eval]
every = 2
batches = 1

[precision]
view = "bf16"

[parallel]
pipeline = 1
data = 2
zero = 3

[recovery]
policy = "inputs"
"""
SLOW = 0.05
"""Seconds that a communication of the run to be killed may take longer, so that its end is far away."""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    model = ODD_MODEL | {"attention_dropout": 0.1, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(model))
    ids = np.random.default_rng(2).integers(0, 37, 2001)
    with write_store(tmp_path / "tokens", vocab_size=37, end_id=0, tokenizer=None, source="test") as writer:
        writer.add_tokens(ids)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path))
    return path


def start(run_file: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ratrain", "train", str(run_file), "--out", str(out), *options]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=run_file.parent,
    )


def finish(run: subprocess.Popen[str]) -> str:
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, out + err
    return out


def metrics(out: Path) -> tuple[dict[int, tuple[Any, ...]], list[float]]:
    """Per step what must be equal to the last bit, and the evaluations."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = {r["step"]: (r["loss"], r["grad_norm"], r["lr"], r["target_tokens"]) for r in rows if "loss" in r}
    return steps, [r["eval_loss"] for r in rows if "eval_loss" in r]


def await_checkpoint(run: subprocess.Popen[str], path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_and_resumed_is_bitwise_straight_and_bc40_two_runs_at_once(
    run_file: Path, tmp_path: Path
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    # Both with defaults, at the same time, on one host.
    whole = start(run_file, straight)
    cut = start(run_file, broken, "--set", f"run.delay={SLOW}")
    await_checkpoint(cut, broken / "checkpoints" / "step-00000003")
    workers = psutil.Process(cut.pid).children(recursive=True)
    os.kill(cut.pid, signal.SIGKILL)
    cut.communicate(timeout=30)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    assert not (broken / "checkpoints" / "step-00000006").exists()
    finish(whole)

    assert "at step 3" in finish(start(run_file, broken))
    expected, evaluations = metrics(straight)
    found, after = metrics(broken)
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert {n: found[n] for n in (4, 5, 6)} == {n: expected[n] for n in (4, 5, 6)}
    assert after[-2:] == evaluations[-2:]
    ends = [str(out / "checkpoints" / "step-00000006") for out in (straight, broken)]
    states = [call("runtime_plain:state", checkpoint=end) for end in ends]
    assert states[0] == states[1]
    assert len(states[0]) == 3 * 29
