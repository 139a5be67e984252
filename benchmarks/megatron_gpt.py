"""Iteration time of a GPT under Megatron-DeepSpeed: tensor, data and pipeline parallel, 1F1B, full
recomputation.

`Iterations` turns runs into amounts (FLOPs, bytes, messages), once; `Iterations.seconds` prices the amounts
on a platform, for all runs together. All constants are the platform's; the counts below follow from the
operators.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ratrain.errors import UserError
from ratrain.machine.collectives import Port, Transfer, place
from ratrain.machine.gpu_operators import GpuOperators, Work, matmul
from ratrain.machine.platform import Platform

Amount = NDArray[np.float64]

VOCABULARY = 51_200
HALF = 2  # bytes of an fp16 element
# A layer runs forward, again forward (recomputation), and backward, which is two matmuls for each one
# forward.
LAYER_PASSES = 4
# fp16 passes over the scores, unfused attention: forward writes QK^T, scale-mask-softmax reads and writes,
# dropout reads and writes with a byte-mask, the product with V reads: 6.5; backward 9.5; forward runs
# twice.
SCORE_PASSES = 2 * 6.5 + 9.5
# Passes over (tokens x hidden) in a forward pass that every tensor-parallel rank repeats (two layer norms,
# two bias-dropout-adds), and that they divide (GELU on 4 hidden, bias and head transposes of q, k, v).
REPEATED_PASSES = 11
DIVIDED_PASSES = 14
# Bytes a logit in Megatron's vocab-parallel cross entropy, fp32 after an fp16 product, forward and backward:
# cast 6, maximum 4, subtract 8, exponentiate 8, sum 4, divide 8, gradient 16, cast back 6.
LOGIT_BYTES = 60
EMBEDDING_PASSES = 8
# Two all-reduces a layer and forward pass, also when it is recomputed, and two backward.
LAYER_ALL_REDUCES = 6
GRADIENT_BYTES = 4

_COLUMNS = {
    "# GPUs": "gpus",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tensor",
    "data parallelism": "data",
    "pipeline parallelism": "pipeline",
}
_TIME = "iteration time (ms)"


@dataclass(frozen=True)
class Run:
    """One measured run: a row of the file."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    seconds: float

    @property
    def micro_batches(self) -> float:
        """Micro-batches a replica and iteration."""
        return self.global_batch / self.data / self.micro_batch


def read_runs(path: Path) -> list[Run]:
    """The runs of a CSV file; UserError if it cannot be read, lacks a column, or a value is no number."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; expected a folder with single.csv and multi.csv"
        ) from None
    runs = []
    for number, row in enumerate(rows, 2):
        try:
            counts = {name: int(float(row[column])) for column, name in _COLUMNS.items()}
            runs.append(Run(**counts, seconds=float(row[_TIME]) * 1e-3))
        except KeyError as error:
            raise UserError(
                f"{path}: column {error} is missing; expected {', '.join(_COLUMNS)}, {_TIME}"
            ) from None
        except (TypeError, ValueError):
            raise UserError(
                f"{path}, line {number}: a value is missing or not a number; mend the row"
            ) from None
    if not runs:
        raise UserError(f"{path} holds no rows; expected at least one run")
    return runs


@dataclass(frozen=True)
class Messages:
    """Consecutive messages at both network levels: how many, and the bytes through the fullest port."""

    within_steps: float = 0.0
    within_bytes: float = 0.0
    between_steps: float = 0.0
    between_bytes: float = 0.0

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> Messages:
        """Equal transfers at once, sharing ports; what leaves the node is bound by the uplink."""
        loads: dict[Port, float] = {}
        for transfer in transfers:
            for port, size in transfer.loads.items():
                loads[port] = loads.get(port, 0.0) + size
        between = [size for port, size in loads.items() if port.level == "between_nodes"]
        if between:
            return cls(between_steps=transfers[0].steps, between_bytes=max(between))
        if loads:
            return cls(within_steps=transfers[0].steps, within_bytes=max(loads.values()))
        return cls()

    def __add__(self, other: Messages) -> Messages:
        return Messages(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __rmul__(self, times: float) -> Messages:
        return Messages(*(times * getattr(self, f.name) for f in fields(self)))

    def seconds(self, platform: Platform) -> float:
        """Latency of every step plus bytes over bandwidth."""
        within, between = platform.link("within_node"), platform.between_nodes
        return (
            self.within_steps * within.latency
            + self.within_bytes / within.total_bandwidth
            + self.between_steps * between.latency
            + self.between_bytes / between.total_bandwidth
        )


def layer_work(run: Run) -> Work:
    """One layer and micro-batch on one tensor-parallel rank: forward, recomputation and backward."""
    tokens, hidden, t = run.micro_batch * run.sequence, run.hidden, run.tensor
    products = (
        matmul(tokens, 3 * hidden / t, hidden)
        + matmul(tokens, hidden, hidden / t)
        + matmul(tokens, 4 * hidden / t, hidden)
        + matmul(tokens, hidden, 4 * hidden / t)
    )
    # The whole square of scores is computed; the mask comes after.
    attention = Work(flops=4.0 * run.sequence * tokens * hidden / t)
    scores = run.micro_batch * run.heads / t * run.sequence**2
    activations = tokens * hidden * (REPEATED_PASSES + DIVIDED_PASSES / t)
    elementwise = Work(bytes=HALF * (SCORE_PASSES * scores + LAYER_PASSES * activations))
    return LAYER_PASSES * (products + attention) + elementwise


def head_work(run: Run) -> Work:
    """Logits and loss of one micro-batch on one tensor-parallel rank, forward and backward."""
    tokens, rows = run.micro_batch * run.sequence, VOCABULARY / run.tensor
    return 3 * matmul(tokens, rows, run.hidden) + Work(bytes=LOGIT_BYTES * tokens * rows)


def parameters_per_device(run: Run) -> float:
    """Of the fullest stage: its layers' 12 hidden^2 each, and the embedding matrix."""
    return (12 * run.hidden**2 * run.layers / run.pipeline + VOCABULARY * run.hidden) / run.tensor


class Iterations:
    """Runs as arrays of amounts, one element a run."""

    def __init__(self, runs: Sequence[Run], platform: Platform) -> None:
        """`platform` gives which devices share a node; its rates are not read."""
        self.measured: Amount = np.array([run.seconds for run in runs])
        self.micro_batches: Amount = np.array([run.micro_batches for run in runs])
        self.stages: Amount = np.array([float(run.pipeline) for run in runs])
        self.layers: Amount = np.array([run.layers / run.pipeline for run in runs])
        self.parameters: Amount = np.array([parameters_per_device(run) for run in runs])
        self.layer = _stack_work([layer_work(run) for run in runs])
        self.head = _stack_work([head_work(run) for run in runs])
        self.embed = _stack_work(
            [
                Work(bytes=EMBEDDING_PASSES * HALF * run.micro_batch * run.sequence * run.hidden)
                for run in runs
            ]
        )
        all_reduce = [_tensor_all_reduce(run, platform) for run in runs]
        self.layer_messages = _stack_messages([LAYER_ALL_REDUCES * messages for messages in all_reduce])
        self.embed_messages = _stack_messages(all_reduce)
        self.boundary = _stack_messages([_stage_boundary(run, platform) for run in runs])
        self.reduction = _stack_messages([_gradient_reduction(run, platform) for run in runs])

    def seconds(self, platform: Platform) -> Amount:
        """Predicted seconds an iteration.

        1F1B with unequal stages: the first micro-batch passes every stage, the other M-1 follow at the pace
        of the slowest. Then the gradients are all-reduced, overlapped with nothing, and the optimizer runs.
        """
        gpu = GpuOperators.of(platform.device, "fp16")
        layer = gpu.layer_seconds(self.layer, LAYER_PASSES) + self.layer_messages.seconds(platform)
        middle = self.layers * layer + self.boundary.seconds(platform)
        embed = gpu.seconds(self.embed) + self.embed_messages.seconds(platform)
        head = gpu.seconds(self.head)
        slowest = middle + np.where(self.stages > 1, np.maximum(embed, head), embed + head)
        pipeline = self.stages * middle + embed + head + (self.micro_batches - 1) * slowest
        return pipeline + self.reduction.seconds(platform) + self.parameters / platform.device.optimizer_rate


def trivial_amounts(runs: Sequence[Run]) -> Amount:
    """FLOPs a device times the 1F1B bubble: the model that knows one FLOP rate and nothing else."""
    amounts = []
    for run in runs:
        parameters = 12 * run.hidden**2 * run.layers + VOCABULARY * run.hidden
        flops = 8 * parameters * run.global_batch * run.sequence / run.gpus
        amounts.append(flops * (1 + (run.pipeline - 1) / run.micro_batches))
    return np.array(amounts)


def _tensor_all_reduce(run: Run, platform: Platform) -> Messages:
    size = HALF * run.micro_batch * run.sequence * run.hidden
    return Messages.of([place("all_reduce", "ring", range(run.tensor), size, platform)])


def _stage_boundary(run: Run, platform: Platform) -> Messages:
    """An activation and a gradient; each tensor rank sends a slice (Narayanan et al. 2021, section 4.1)."""
    if run.pipeline == 1:
        return Messages()
    stage = run.tensor * run.data
    size = HALF * run.micro_batch * run.sequence * run.hidden / run.tensor
    senders = range(min(stage, platform.devices_per_node))
    return 2 * Messages.of([place("p2p", "ring", (rank, rank + stage), size, platform) for rank in senders])


def _gradient_reduction(run: Run, platform: Platform) -> Messages:
    """One all-reduce of fp32 gradients; the groups of all tensor ranks run at once and share uplinks."""
    size = GRADIENT_BYTES * parameters_per_device(run)
    groups = (range(first, run.tensor * run.data, run.tensor) for first in range(run.tensor))
    return Messages.of([place("all_reduce", "ring", group, size, platform) for group in groups])


def _stack_work(items: Sequence[Work]) -> Work:
    return Work(np.array([w.flops for w in items]), np.array([w.bytes for w in items]))  # type: ignore[arg-type]


def _stack_messages(items: Sequence[Messages]) -> Messages:
    return Messages(*(np.array([getattr(item, f.name) for item in items]) for f in fields(Messages)))  # type: ignore[arg-type]
