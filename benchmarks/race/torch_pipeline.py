"""torch.distributed.pipelining, alone and over DDP or FSDP2."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from race.rows import Case
from race.stack import Stack, adamw, loss
from race.torch_data_parallel import shard
from race.workload import open_tokens


class Pipeline:
    """One rank: one or two stages of a schedule, and one optimizer for all its parameters."""

    def __init__(self, case: Case, rank: int, store: Path, schedule: type, order: str) -> None:
        """order: which stages a rank holds: "one", "loop" (r and r+P) or "v" (r and 2P-1-r)."""
        self.case = case
        here, self.replica = case.place(rank)
        mesh = init_device_mesh("cpu", (case.pipeline, case.data), mesh_dim_names=("stage", "replica"))
        count = case.pipeline * (1 if order == "one" else 2)
        mine = {"one": [here], "loop": [here, here + case.pipeline], "v": [here, count - 1 - here]}[order]
        layers = case.layers if order == "one" else _even(case.model.layers, count)
        cuts = list(accumulate(layers, initial=0))
        self.over = case.options.get("over", "")
        self.stacks = [Stack(case.model, cuts[s], cuts[s + 1], case.recover == "inputs") for s in mine]
        stages = [
            pipelining.PipelineStage(
                self._spread(stack, mesh["replica"]),
                s,
                count,
                torch.device("cpu"),
                group=mesh.get_group("stage"),
            )
            for s, stack in zip(mine, self.stacks)
        ]
        self.first, self.last = 0 in mine, count - 1 in mine
        self.schedule: Any = schedule(
            stages[0] if order == "one" else stages, n_microbatches=case.micro_batches, loss_fn=loss
        )
        self.stage_group = mesh.get_group("stage")
        self.optimizer = adamw(nn.ModuleList(self.stacks))
        self.tokens = open_tokens(case.model, store, case.global_batch)

    def train(self, first: int, count: int) -> list[float]:
        losses = [self._step(step) for step in range(first, first + count)]
        return [value for value in losses if value is not None]

    def details(self) -> dict[str, Any]:
        return {}

    def _step(self, step: int) -> float | None:
        case = self.case
        start = case.microbatch(self.replica, 0).start
        data = self.tokens.sequences(step, range(start, start + case.micro_batches * case.micro_batch))
        losses: list[torch.Tensor] = []
        arguments = (torch.from_numpy(data.inputs),) if self.first else ()
        ends: dict[str, Any] = (
            {"target": torch.from_numpy(data.targets), "losses": losses} if self.last else {}
        )
        # Nobody reads the logits of the whole batch, which would be kept otherwise.
        self.schedule.step(*arguments, **ends, return_outputs=False)
        if case.clip:
            self._clip(case.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.over != "ddp")
        return torch.stack(losses).mean().item() if losses else None

    def _clip(self, most: float) -> None:
        """By the norm over all stages."""
        gradients = [p.grad for stack in self.stacks for p in stack.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(norm, group=self.stage_group)
        parameters = [p for stack in self.stacks for p in stack.parameters()]
        nn.utils.clip_grads_with_norm_(parameters, most, norm.sqrt())

    def _spread(self, stack: Stack, mesh: Any) -> nn.Module:
        if self.over == "ddp":
            return DistributedDataParallel(
                stack, process_group=mesh.get_group(), gradient_as_bucket_view=True
            )
        if self.over == "fsdp2":
            shard(stack, mesh, self.case.options["reshard"])
        return stack


def make_1f1b(case: Case, rank: int, store: Path) -> Pipeline:
    """Schedule1F1B; options.over: "ddp" or "fsdp2" over the replicas of a stage."""
    return Pipeline(case, rank, store, pipelining.Schedule1F1B, "one")


def make_gpipe(case: Case, rank: int, store: Path) -> Pipeline:
    """ScheduleGPipe."""
    return Pipeline(case, rank, store, pipelining.ScheduleGPipe, "one")


def make_interleaved(case: Case, rank: int, store: Path) -> Pipeline:
    """ScheduleInterleaved1F1B, two stages a rank."""
    return Pipeline(case, rank, store, pipelining.ScheduleInterleaved1F1B, "loop")


def make_zbv(case: Case, rank: int, store: Path) -> Pipeline:
    """ScheduleZBVZeroBubble. Over DDP it does not synchronise replicas in torch 2.13: the loss check tells."""
    return Pipeline(case, rank, store, pipelining.ScheduleZBVZeroBubble, "v")


def _even(layers: int, stages: int) -> list[int]:
    return [layers // stages + (s < layers % stages) for s in range(stages)]
