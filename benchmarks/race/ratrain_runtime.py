"""RATrain as a contender: the product's own trainer on a plan, without checkpoints or evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from race.ratrain_plan import plan_of
from race.rows import Case
from race.workload import BETA1, BETA2, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, open_tokens
from ratrain.program.timeline import Timeline
from ratrain.runtime.build import StageSettings
from ratrain.runtime.mesh import build_mesh
from ratrain.runtime.optimizer import StepRule
from ratrain.runtime.shard_optimizer import AdamW
from ratrain.runtime.trainer import Job, Trainer
from ratrain.runtime.units import UnitFormat


@dataclass
class _Losses:
    """A recorder that remembers losses."""

    losses: list[float] = field(default_factory=list)

    def update(self, metrics: Mapping[str, Any]) -> None:
        self.losses.append(float(metrics["loss"]))

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """None is asked for."""

    def note(self, text: str) -> None:
        """Nobody reads."""

    def trace(self, timeline: Timeline) -> None:
        """Rows are asked for rank by rank."""


class RATrain:
    """One rank of the trainer."""

    def __init__(self, case: Case, rank: int, store: Path) -> None:
        plan = plan_of(case)
        layout = plan.layout()
        mesh = build_mesh(layout.pipeline, layout.replicas, rank, layout.tied_across)
        settings = StageSettings(
            case.model.seq_len,
            case.micro_batch,
            SEED,
            UnitFormat(torch.float32, torch.float32, torch.float32),
            AdamW(WEIGHT_DECAY, BETA1, BETA2, EPSILON),
        )
        job = Job(
            spec=case.model.spec(),
            layout=layout,
            passes=plan.passes,
            settings=settings,
            steps=0,
            global_batch=case.global_batch,
            eval_every=0,
            checkpoint_every=0,
            keep_checkpoints=1,
            checkpoints=store,
            identity={},
            trace_steps=_TRACED,
        )
        rule = StepRule(lambda position: LEARNING_RATE, case.clip, None, layout.gated)
        self._recorder = _Losses()
        self._trainer = Trainer(
            job,
            mesh,
            rule,
            torch.device("cpu"),
            open_tokens(case.model, store, case.global_batch),
            None,
            self._recorder if rank == 0 else None,
        )

    def train(self, first: int, count: int) -> list[float]:
        self._recorder.losses.clear()
        trainer = self._trainer
        trainer._trace.clear()
        for _ in range(count):
            trainer._train_step()
        trainer._flush()
        return list(self._recorder.losses)

    def details(self) -> dict[str, Any]:
        rows = [row for rows in self._trainer._trace for row in rows]
        return {"timeline": Timeline(rows).to_json()}


_TRACED = 16
"""Steps whose rows are kept: all of a window."""


def make(case: Case, rank: int, store: Path) -> RATrain:
    """A contender on the plan of `case`."""
    if not case.options.get("in_place_grads", True):
        _leave_backward_to_autograd()
    return RATrain(case, rank, store)


def _leave_backward_to_autograd() -> None:
    """Weight gradients through temporaries, as autograd makes them, and the head's logits kept by autograd."""
    from ratrain.model import blocks, linear, main_grad
    from ratrain.runtime import build

    def through_a_temporary(parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        main_grad.accumulate(parameter, left @ right)

    linear.accumulate_product = through_a_temporary
    build.build_block = partial(blocks.build_block, own_head=False)  # type: ignore[assignment]
