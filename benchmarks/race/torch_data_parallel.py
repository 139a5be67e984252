"""torch's data-parallel tools: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from race.rows import Case
from race.stack import ADAMW, Stack, adamw, loss, parameter_groups
from race.workload import open_tokens


class DataParallel:
    """Gradient accumulation over the micro-batches, one reduction, one update."""

    def __init__(
        self, case: Case, rank: int, store: Path, stack: Stack, network: nn.Module, optimizer: Any
    ) -> None:
        self.case, self.replica = case, rank
        self.stack, self.network, self.optimizer = stack, network, optimizer
        self.tokens = open_tokens(case.model, store, case.global_batch)

    def train(self, first: int, count: int) -> list[float]:
        return [self._step(step) for step in range(first, first + count)]

    def details(self) -> dict[str, Any]:
        return {}

    def _step(self, step: int) -> float:
        case, total = self.case, 0.0
        for number in range(case.micro_batches):
            data = self.tokens.sequences(step, case.microbatch(self.replica, number))
            last = number == case.micro_batches - 1
            with self.synchronised(last):
                logits = self.network(torch.from_numpy(data.inputs))
                value = loss(logits, torch.from_numpy(data.targets)) / case.micro_batches
                value.backward()
            total += value.item()
        if case.clip:
            nn.utils.clip_grad_norm_(self.stack.parameters(), case.clip)
        self.optimizer.step()
        self.clear_gradients()
        return total

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch; only the last one's backward communicates."""
        return nullcontext() if last else self.network.no_sync()  # type: ignore[operator]

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)  # gradients are views of the buckets


class Fsdp2(DataParallel):
    """Parameters sharded over the replicas. With `reshard` they are dropped again after each forward."""

    def __init__(self, case: Case, rank: int, store: Path) -> None:
        stack = _stack(case)
        mesh = init_device_mesh("cpu", (case.data,))
        shard(stack, mesh, case.options["reshard"])
        super().__init__(case, rank, store, stack, stack, adamw(stack))

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        network: Any = self.network
        network.set_requires_gradient_sync(last)
        network.set_is_last_backward(last)
        if not self.case.options["reshard"]:
            network.set_reshard_after_backward(last)
        return nullcontext()

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()


def shard(stack: Stack, mesh: Any, reshard: bool) -> None:
    """FSDP2 as its documentation has it: each layer a unit, the rest one more."""
    for part in stack:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(stack, mesh=mesh, reshard_after_forward=reshard)


def make_ddp(case: Case, rank: int, store: Path) -> DataParallel:
    """DDP; a single process without it."""
    stack = _stack(case)
    if case.data == 1:
        return _Single(case, rank, store, stack, stack, adamw(stack))
    return DataParallel(case, rank, store, stack, _wrapped(stack), adamw(stack))


def make_zero_redundancy(case: Case, rank: int, store: Path) -> DataParallel:
    """DDP with optimizer states sharded over the replicas (ZeRO-1)."""
    stack = _stack(case)
    network = _wrapped(stack)
    optimizer = ZeroRedundancyOptimizer(
        parameter_groups(stack), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    return DataParallel(case, rank, store, stack, network, optimizer)


def make_fsdp2(case: Case, rank: int, store: Path) -> Fsdp2:
    """FSDP2 with options.reshard on or off."""
    return Fsdp2(case, rank, store)


class _Single(DataParallel):
    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()


def _stack(case: Case) -> Stack:
    return Stack(case.model, 0, case.model.layers, case.recover == "inputs")


def _wrapped(stack: Stack) -> DistributedDataParallel:
    return DistributedDataParallel(stack, gradient_as_bucket_view=True)
