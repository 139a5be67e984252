"""The trainer: which program runs next, and what happens between programs.

Between two updates it chooses a form of the program; at evaluations, checkpoints and the end it flushes the
deferred work first. What a step does is the program's business alone.
"""

from __future__ import annotations

import json
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ratrain.data.sampler import EvaluationSampler, Sampler
from ratrain.model.spec import ModelSpec, ParameterShape
from ratrain.program.layout import Layout
from ratrain.program.passes import build
from ratrain.program.program import Program
from ratrain.program.timeline import Row, Timeline
from ratrain.runtime import checkpoint
from ratrain.runtime.account import Ledger, summarise
from ratrain.runtime.backends import TorchBackend
from ratrain.runtime.build import StageSettings, build_stage
from ratrain.runtime.clock import offsets
from ratrain.runtime.collectives import gather_vectors
from ratrain.runtime.device import streams_of
from ratrain.runtime.executor import Executor, LoweredLane, lower_lane
from ratrain.runtime.manifest import Manifest, read_manifest
from ratrain.runtime.mesh import Mesh
from ratrain.runtime.optimizer import StepRule
from ratrain.runtime.stage import StageStep, StepReport


class Recorder(Protocol):
    """Where rank 0 puts what people read."""

    def update(self, metrics: Mapping[str, Any]) -> None: ...
    def evaluation(self, metrics: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def trace(self, timeline: Timeline) -> None: ...


@dataclass(frozen=True)
class Job:
    """What a run is, resolved: equal on every rank.

    steps, global_batch      updates in all, sequences per update
    eval_every, checkpoint_every  updates between; 0: only at the end
    identity                 settings that a checkpoint must share to be gone on with
    value                    initial values of parameters; None: fresh ones
    resume                   complete checkpoint to start from
    """

    spec: ModelSpec
    layout: Layout
    passes: tuple[str, ...]
    settings: StageSettings
    steps: int
    global_batch: int
    eval_every: int
    checkpoint_every: int
    keep_checkpoints: int
    checkpoints: Path
    identity: dict[str, Any]
    resume: Path | None = None
    value: Callable[[ParameterShape], Tensor] | None = None
    trace_steps: int = 3
    delay: float = 0.0
    samples: Path | None = None
    save_last: bool = True


@dataclass
class _Pending:
    """A step whose metrics are not written yet: its report and, one step later, its ranks' accounts."""

    step: StageStep
    stats: tuple[tuple[float, ...], ...] | None = None


@dataclass
class Trainer:
    """One rank's run. `sampler` and `validation` give data, `recorder` exists on rank 0 only."""

    job: Job
    mesh: Mesh
    rule: StepRule
    device: torch.device
    sampler: Sampler
    validation: EvaluationSampler | None
    recorder: Recorder | None = None
    backend: TorchBackend = field(default_factory=TorchBackend)
    step: int = 0
    _stop: bool = False
    _last: StageStep | None = None  # its deferred work may be open
    _known: StageStep | None = None  # the newest whose report every rank has
    _deferred: bool = False
    _ledger: Ledger = field(default_factory=Ledger)
    _unwritten: deque[_Pending] = field(default_factory=deque)
    _trace: deque[list[Row]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        job, mesh = self.job, self.mesh
        streams = streams_of(self.device)
        self.stage = build_stage(
            job.spec,
            job.layout,
            mesh,
            job.settings,
            job.passes,
            self.rule,
            self.device,
            job.value,
            streams,
            self.backend,
        )
        self.executor = Executor(
            mesh.rank, self.stage.handlers, self.stage.posts, streams, job.delay, job.settings.seed
        )
        self.programs: dict[str, Program] = {}
        self.lanes: dict[str, LoweredLane] = {}
        for form in ("first", "steady", "flush", "evaluate"):
            self.programs[form] = build(job.layout, form, job.passes)
            self.lanes[form] = lower_lane(self.programs[form], mesh.stage, mesh.replica)
        self._clock_offsets = offsets(mesh)

    def run(self) -> bool:
        """Trains to the last step, or until asked to stop. Returns whether it reached the end."""
        previous = signal.signal(signal.SIGTERM, self._asked_to_stop)
        try:
            if self.job.resume is not None:
                self._resume(self.job.resume)
            while self.step < self.job.steps and not self._stopping():
                self._train_step()
                self._at_boundary()
            self._flush()
            finished = self.step >= self.job.steps
            if finished and self.validation is not None and not self._due(self.job.eval_every):
                self._evaluate()
            if self.job.save_last and not self._due(self.job.checkpoint_every) and self.step > 0:
                self._save()
            self._write_trace()
            return finished
        finally:
            self.executor.close()
            signal.signal(signal.SIGTERM, previous)

    def _train_step(self) -> None:
        denominator = self.sampler.target_tokens(self.step)
        if denominator == 0:
            self._flush()
            if self.recorder is not None:
                self.recorder.note(f"step {self.step + 1}: no target tokens in the global batch, skipped")
                self.recorder.update(
                    {"step": self.step + 1, "skipped": True, "target_tokens": 0, "reason": "no target tokens"}
                )
            self.step += 1
            return
        form = "steady" if self._last is not None else "first"
        step = StageStep(
            number=self.step,
            previous=self._last,
            source=self.sampler,
            program=self.programs[form],
            position=self._position(),
            stop=self._stop,
            denominator=denominator,
        )
        open_ledger = self._ledger
        step.stats = lambda: open_ledger.close(step.rows)  # of the step before, closed by now
        self._run(form, step)
        step.account = self.backend.account()
        self._ledger = Ledger.opened(self.step, step.rows)
        self._unwritten.append(_Pending(step))
        self._last, self._deferred = step, self.programs[form].deferred
        self.step += 1
        self._write_metrics()

    def _position(self) -> int:
        """Updates applied before the coming one. Without a gate no update is ever skipped."""
        if self._last is None:
            return self.rule.applied
        return self._last.position + 1

    def _run(self, form: str, step: StageStep) -> None:
        lane = self.lanes[form]
        if not lane.actions:
            return
        self.executor.run(lane, step)
        if step.previous is not None:
            # Its deferred work is issued; what is still under way belongs to this step now.
            self.executor.finish(step.previous)
            step.previous.previous = None
            self._known = self._last
        self._trace.append(step.rows)
        while len(self._trace) > self.job.trace_steps + 2:
            self._trace.popleft()

    def _stopping(self) -> bool:
        """Whether some rank was asked to end; every rank learns it at the same step."""
        known = self._known
        return known is not None and known.report is not None and known.report.stop

    def _at_boundary(self) -> None:
        evaluates = self.validation is not None and self._due(self.job.eval_every)
        saves = self._due(self.job.checkpoint_every)
        if evaluates or saves:
            self._flush()
        if evaluates:
            self._evaluate()
        if saves:
            self._save()

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _flush(self) -> None:
        """Runs the deferred work, so that weights, moments and views are those after the last step."""
        last = self._last
        if last is None:
            return
        if self._deferred:
            step = StageStep(
                number=last.number, previous=last, source=self.sampler, program=self.programs["flush"]
            )
            self._run("flush", step)
            self.executor.finish(step)
            self._ledger = self._ledger.extended(step.rows)
        self.executor.finish(last)
        row = torch.tensor(self._ledger.close(()), dtype=torch.float64, device=self.device)
        table = gather_vectors(row, self.mesh.world).cpu().tolist()
        self._unwritten[-1].stats = tuple(tuple(r) for r in table)
        self._write_metrics()
        self._ledger = Ledger()
        self._known, self._last = last, None

    def _evaluate(self) -> None:
        assert self.validation is not None
        total, tokens = 0.0, 0
        for batch in range(self.validation.batches):
            count = self.validation.target_tokens(batch)
            if count == 0:
                continue
            step = StageStep(
                number=batch,
                source=self.validation,
                program=self.programs["evaluate"],
                train=False,
                denominator=count,
            )
            self.executor.run(self.lanes["evaluate"], step)
            self.executor.finish(step)
            assert step.report is not None
            total += step.report.loss * count
            tokens += count
        if self.recorder is not None and tokens:
            self.recorder.evaluation({"step": self.step, "eval_loss": total / tokens, "eval_tokens": tokens})

    def _save(self) -> None:
        manifest = Manifest(
            step=self.step,
            sequences=self.step * self.job.global_batch,
            applied=self.rule.applied,
            rule=self.rule.state(),
            shapes={n: list(p.shape) for n, p in self.job.spec.all_parameters().items()},
            run=self.job.identity,
            layout=_describe(self.job.layout),
            tensor=self.mesh.tensor,
        )
        path = checkpoint.save(
            self.job.checkpoints, manifest, self.stage.units.values(), self.mesh, self.job.keep_checkpoints
        )
        if self.recorder is not None:
            self.recorder.note(f"step {self.step}: saved {path}")

    def _resume(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        checkpoint.load(folder, manifest, self.stage.units.values(), self.mesh)
        self.step = manifest.step
        self.rule.restore(manifest.rule)
        if self.recorder is not None:
            self.recorder.note(
                f"resumed from {folder} at step {manifest.step} (written by {manifest.layout})"
            )

    def _write_metrics(self) -> None:
        """Rank 0 writes every step whose norm and accounts are known. A step's accounts come with the next
        step's GRAD_NORM, or from the flush."""
        waiting = list(self._unwritten)
        for pending, following in pairwise(waiting):
            if pending.stats is None and following.step.report is not None:
                pending.stats = following.step.report.stats
        while self._unwritten and self._unwritten[0].stats is not None:
            done = self._unwritten[0]
            report = done.step.report
            if report is None:
                break
            if self.recorder is not None:
                self.recorder.update(self._metrics(done.step, report, done.stats or ()))
            self._log_samples(done.step)
            self._unwritten.popleft()

    def _metrics(
        self, step: StageStep, report: StepReport, stats: tuple[tuple[float, ...], ...]
    ) -> dict[str, Any]:
        measured = summarise(stats)
        tokens = step.denominator
        lr = report.lr if self.rule.gated else self.rule.schedule(step.position)
        return {
            "step": step.number + 1,
            "loss": report.loss,
            "grad_norm": report.norm,
            "lr": lr,
            "target_tokens": tokens,
            "tokens_per_s": tokens / measured["step_time_s"] if measured["step_time_s"] else 0.0,
            **measured,
            "skipped": report.skipped,
            **step.account,
        }

    def _log_samples(self, step: StageStep) -> None:
        if self.job.samples is None:
            return
        with self.job.samples.open("a") as out:
            for j in range(self.job.layout.microbatches):
                record = {
                    "step": step.number + 1,
                    "rank": self.mesh.rank,
                    "microbatch": self.mesh.replica * self.job.layout.microbatches + j,
                    "sample_ids": step.sample_ids.get(j),
                    "loss": float(step.losses[j]) if j in step.losses else None,
                }
                out.write(json.dumps(record) + "\n")

    def _write_trace(self) -> None:
        rows = [list(row) for rows in self._trace for row in rows]
        table: list[Any] | None = [None] * self.mesh.size if self.mesh.rank == 0 else None
        dist.gather_object((rows, self._clock_offsets), table, dst=0, group=self.mesh.world)
        if self.recorder is not None and table is not None:
            timeline = Timeline(
                [Row(*row) for part, _ in table for row in part],
                {rank: offset for rank, (_, offset) in enumerate(table)},
            )
            self.recorder.trace(timeline)

    def _asked_to_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stop = True


def _describe(layout: Layout) -> str:
    tensor = f" T={layout.tensor}" if layout.tensor > 1 else ""
    return (
        f"P={layout.pipeline} D={layout.replicas}{tensor} ZeRO-{layout.zero}, "
        f"layers {'/'.join(map(str, layout.layer_counts))}"
    )
