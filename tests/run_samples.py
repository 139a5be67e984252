"""A corpus, a model and run files that tests make for themselves, and a run in a process of its own."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SETTINGS = {
    "data.seq_len": 16,
    "train.steps": 8,
    "train.global_batch": 8,
    "train.micro_batch": 2,
    "train.lr": 0.003,
    "train.warmup_steps": 2,
    "train.checkpoint_every": 2,
    "eval.every": 4,
    "eval.batches": 2,
    "parallel.pipeline": 2,
    "parallel.data": 2,
    "parallel.zero": 1,
    "machine.memory": "2 GB",
}
WORDS = "stage rank micro batch view shard gradient forward backward recover sync update the of in to and"


def write_corpus(folder: Path, documents: int = 30, seed: int = 7) -> Path:
    """Text that depends on the arguments only."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = random.Random(seed)
    for number in range(documents):
        lines = [" ".join(chosen.choices(WORDS.split(), k=12)) for _ in range(12)]
        (folder / f"{number:02}.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_model(folder: Path, **changes: Any) -> Path:
    """A model folder; a change to None leaves the key out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**MODEL, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_run(folder: Path, **changes: Any) -> Path:
    """RUN.toml in `folder`, with corpus, model and cache beside it. Keys use `__` for the dot."""
    settings = {
        "model.config": str(write_model(folder / "model")),
        "data.corpus": str(write_corpus(folder / "corpus")),
        "data.cache": str(folder / "cache"),
        "run.out": str(folder / "run"),
        **SETTINGS,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    sections: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, name = key.split(".")
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    text = "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items())
    path = folder / "run.toml"
    path.write_text(text + "\n")
    return path


def environment(**more: str) -> dict[str, str]:
    """This process's, without what a launcher would have put there."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in launcher}
    return kept | {"OMP_NUM_THREADS": "1", **more}


class Ratrain:
    """`python -m ratrain ARGUMENTS` in a process of its own, or another command."""

    def __init__(self, *arguments: str | Path, command: Sequence[str] = (), **env: str) -> None:
        started = command or (sys.executable, "-m", "ratrain", *map(str, arguments))
        self.process = subprocess.Popen(
            started,
            env=environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.lines: list[str] = []

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads standard output up to a line that matches."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"ended without {pattern!r}: {self.lines} {self.process.communicate()}")

    def workers(self) -> dict[int, psutil.Process]:
        """The direct children that call themselves a rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            if match := re.match(r"ratrain train rank (\d+)/", " ".join(child.cmdline())):
                found[int(match[1])] = child
        return found

    def end(self, timeout: float = 120) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, "".join(self.lines) + out, err


@contextmanager
def running(*arguments: str | Path, **env: str) -> Iterator[Ratrain]:
    """A run that is killed at the end of the block if it still runs."""
    run = Ratrain(*arguments, **env)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()


def gone(processes: Sequence[psutil.Process], timeout: float = 5) -> bool:
    """Whether all end in time; one that nobody has collected yet counts as ended."""
    left = psutil.wait_procs(processes, timeout=timeout)[1]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The objects of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def column(folder: Path, key: str) -> list[Any]:
    """One column of the updates (loss, grad_norm) or of the evaluations (eval_loss), in full precision."""
    return [entry[key] for entry in metrics(folder) if key in entry and "run" not in entry]


def own_lines(text: str) -> list[str]:
    """Lines that ratrain itself printed as errors."""
    return [line for line in text.splitlines() if line.startswith("ratrain: ")]


@dataclass(frozen=True)
class Trained:
    """A run that has ended well.

    toml    its run file; corpus, model and cache lie beside it
    run     its run folder
    said    what it printed
    """

    toml: Path
    run: Path
    said: str


def train_sample(folder: Path) -> Trained:
    """Runs `write_run`'s run as it stands."""
    toml = write_run(folder)
    with running("train", toml) as run:
        status, out, err = run.end(240)
    assert status == 0, err
    return Trained(toml, folder / "run", out)
