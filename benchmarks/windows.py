"""What benchmarks that hold forecasts against wall clock share: a window of real steps, and how far off a model is."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.config import Config
from ratrain.model.spec import ModelSpec
from ratrain.plan.plan import Plan

if TYPE_CHECKING:
    from ratrain.program.timeline import Timeline
    from ratrain.runtime.mesh import Mesh

_SETTLE = 2


def write_random_store(folder: Path, vocab: int) -> None:
    """`folder`/store/train: random tokens, enough for a window of any row."""
    import numpy as np

    from ratrain.data.store import write_store

    tokens = np.random.default_rng(0).integers(0, vocab, 200_000)
    store = folder / "store" / "train"
    with write_store(store, vocab_size=vocab, end_id=0, tokenizer="none", source="random") as out:
        out.add_tokens(tokens)


class _StepTimes:
    """A recorder that keeps step times and the last trace."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.timeline: Timeline | None = None

    def update(self, metrics: Mapping[str, Any]) -> None:
        self.seconds.append(metrics["step_time_s"])

    def evaluation(self, metrics: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def trace(self, timeline: Timeline) -> None:
        self.timeline = timeline


def window(
    config: Config,
    spec: ModelSpec,
    plan: Plan,
    mesh: Mesh,
    folder: Path,
    count: int,
    durations: Mapping[str, float] | None = None,
) -> tuple[list[float], Timeline | None]:
    """Seconds of `count` steps of a fresh trainer on the store in `folder`, and its trace; nothing but on rank 0.

    Two steps before them settle, and one more is left out, because a flush ends it and not a next step.
    """
    import torch

    from ratrain.runtime.work import Assignment, make_trainer

    steps = _SETTLE + count + 1
    assignment = Assignment(
        config=dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps)),
        spec=spec,
        layout=plan.layout(),
        passes=plan.passes,
        micro_batch=plan.micro_batch,
        slice_tokens=plan.slice_tokens,
        formats=(plan.view, plan.grad, plan.reduce),
        weights=None,
        train=folder / "store" / "train",
        validation=None,
        resume=None,
        folder=folder,
        checkpoints=folder / "checkpoints",
        identity={},
        durations=dict(durations or {}),
    )
    recorder = _StepTimes() if mesh.rank == 0 else None
    make_trainer(assignment, mesh, torch.device("cpu"), recorder, save_last=False).run()
    return (recorder.seconds[_SETTLE:-1], recorder.timeline) if recorder else ([], None)


def errors(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Relative errors of `forecast`, and of `trivial` with its one rate fitted to all rows, against `measured`."""
    rate = statistics.median(row["trivial"] / row["measured"] for row in rows)
    return (
        [row["forecast"] / row["measured"] - 1 for row in rows],
        [row["trivial"] / rate / row["measured"] - 1 for row in rows],
    )


def summary(forecast: Sequence[float], trivial: Sequence[float]) -> str:
    """Mean and worst errors, a line each."""
    lines = []
    for name, values in (("forecast", forecast), ("trivial model", trivial)):
        mean, worst = sum(map(abs, values)) / len(values), max(map(abs, values))
        lines.append(f"{name}: mean error {mean:.1%}, worst {worst:.1%}, over {len(values)} rows")
    return "\n".join(lines)
