"""DeepSpeed on the CPU: ZeRO stages 1 to 3, and PipelineModule."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

from race.rows import Case
from race.stack import Embedding, Head, Layer, Stack, adamw, loss
from race.workload import open_tokens


class Zero:
    """The engine with optimizer states, gradients, parameters sharded."""

    def __init__(self, case: Case, rank: int, store: Path) -> None:
        self.case, self.replica = case, rank
        stack = Stack(case.model, 0, case.model.layers, case.recover == "inputs")
        sharding = {
            "stage": case.zero,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
        }
        self.engine = _engine(case, stack, stack, {"zero_optimization": sharding})
        self.tokens = open_tokens(case.model, store, case.global_batch)

    def train(self, first: int, count: int) -> list[float]:
        return [self._step(step) for step in range(first, first + count)]

    def details(self) -> dict[str, Any]:
        return {}

    def _step(self, step: int) -> float:
        case, total = self.case, 0.0
        for number in range(case.micro_batches):
            data = self.tokens.sequences(step, case.microbatch(self.replica, number))
            value = loss(self.engine(torch.from_numpy(data.inputs)), torch.from_numpy(data.targets))
            self.engine.backward(value)
            self.engine.step()
            total += value.item() / case.micro_batches
        return total


class Pipeline:
    """PipelineModule: pipeline and data parallel."""

    def __init__(self, case: Case, rank: int, store: Path) -> None:
        self.case = case
        _, self.replica = case.place(rank)
        model = case.model
        layers = [
            LayerSpec(Embedding, model),
            *(LayerSpec(Layer, model, i, case.recover == "inputs") for i in range(model.layers)),
            LayerSpec(Head, model),
        ]
        network = _Pipeline(
            layers,
            loss_fn=loss,
            topology=PipeDataParallelTopology(num_pp=case.pipeline, num_dp=case.data),
            partition_method=",".join(map(str, case.layers)),
        )
        sharding = {"zero_optimization": {"stage": case.options["zero"]}} if "zero" in case.options else {}
        self.engine = _engine(case, network, network, sharding)
        self.tokens = open_tokens(model, store, case.global_batch)

    def train(self, first: int, count: int) -> list[float]:
        return [self._step(step) for step in range(first, first + count)]

    def details(self) -> dict[str, Any]:
        return {}

    def _step(self, step: int) -> float:
        case = self.case
        batches = []
        for number in range(case.micro_batches):
            data = self.tokens.sequences(step, case.microbatch(self.replica, number))
            batches.append((torch.from_numpy(data.inputs), torch.from_numpy(data.targets)))
        value: float = self.engine.train_batch(iter(batches)).item()
        return value


class _Pipeline(PipelineModule):  # type: ignore[misc]
    """Split by decoder layers per stage; the library's own methods know no such list."""

    def _partition_layers(self, method: str = "uniform") -> None:
        counts = [int(n) for n in method.split(",")]
        counts[0] += 1
        counts[-1] += 1
        self.parts = [sum(counts[:s]) for s in range(len(counts) + 1)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def _engine(case: Case, network: nn.Module, stack: nn.Module, more: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
    }
    return deepspeed.initialize(model=network, optimizer=adamw(stack), config=config)[0]


def make_zero(case: Case, rank: int, store: Path) -> Zero:
    """ZeRO at the case's level."""
    _initialise()
    return Zero(case, rank, store)


def make_pipeline(case: Case, rank: int, store: Path) -> Pipeline:
    """PipelineModule; options.zero: 1 shards optimizer states."""
    _initialise()
    return Pipeline(case, rank, store)


def _initialise() -> None:
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
