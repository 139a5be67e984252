"""What the operators of a model take on the chip: the planner's prices, from the same schedules that run.

An operator is described by what `model.operators.Operator` says of it. Schedules and prices are remembered by
shape, so a whole model is chosen and priced in well under two seconds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from ratrain.machine.mt3000 import layer
from ratrain.machine.mt3000.attention import Heads, best_attention
from ratrain.machine.mt3000.chip import Chip
from ratrain.machine.mt3000.cost import Cost, price
from ratrain.machine.mt3000.gemm import Problem
from ratrain.machine.mt3000.gemm_search import best_gemm
from ratrain.machine.mt3000.schedule import Schedule

ROTARY_HEAD = 128  # of no effect on traffic but for the cosines and sines


class OperatorShape(Protocol):
    """The part of an operator's description that decides its schedule (see `model.operators.Operator`)."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def elements(self) -> int: ...


@lru_cache(maxsize=4096)
def price_schedule(schedule: Schedule, chip: Chip) -> Cost:
    """`price`, remembered; builders return the same schedule for the same shape."""
    return price(schedule, chip)


def linear_costs(
    chip: Chip, rows: int, inputs: int, outputs: int, backward: bool, dtype: str = "fp16"
) -> list[Cost]:
    """Y[rows, outputs] = X W' with W [outputs, inputs]; backward: the input's and the weight's gradient."""
    if not backward:
        return [best_gemm(chip, Problem(rows, outputs, inputs, dtype, "nt"))]
    return [
        best_gemm(chip, Problem(rows, inputs, outputs, dtype, "nn")),
        best_gemm(chip, Problem(outputs, inputs, rows, dtype, "tn")),
    ]


def operator_costs(chip: Chip, operator: OperatorShape, backward: bool) -> list[Cost]:
    """The kernels that one operator runs, forward or backward, priced."""
    rows, columns = operator.rows, operator.columns
    match operator.kind:
        case "matmul":
            return linear_costs(chip, rows, operator.inner, columns, backward)
        case "attention":
            return [best_attention(chip, _heads(operator), backward)]
        case "norm":
            norm = layer.rmsnorm_backward if backward else layer.rmsnorm_forward
            return [price_schedule(norm(chip, rows, columns), chip)]
        case "lookup":
            # Only rows that are looked up have a gradient; each is cleared once.
            embed = layer.embedding_backward if backward else layer.embedding_forward
            return [price_schedule(embed(chip, rows, rows, columns), chip)]
        case "loss":
            loss = layer.cross_entropy_backward if backward else layer.cross_entropy_forward
            return [price_schedule(loss(chip, rows, columns), chip)]
    if operator.name == "rotary":
        head = ROTARY_HEAD if columns % ROTARY_HEAD == 0 else columns
        sign = -1 if backward else 1
        return [price_schedule(layer.rotary(chip, rows, columns // head, head, sign), chip)]
    if operator.name == "swiglu":
        swiglu = layer.swiglu_backward if backward else layer.swiglu_forward
        return [price_schedule(swiglu(chip, rows * columns), chip)]
    return [price_schedule(layer.add(chip, rows * columns), chip)]


def operator_seconds(chip: Chip, operator: OperatorShape, backward: bool = False) -> float:
    """Seconds of one operator, forward or backward, launches included."""
    return sum(cost.seconds for cost in operator_costs(chip, operator, backward))


def update_seconds(chip: Chip, parameters: int) -> float:
    """Seconds of one AdamW update of a shard of `parameters` (FP16 gradient and view, FP32 master and moments)."""
    return price_schedule(layer.adamw(chip, parameters), chip).seconds if parameters else 0.0


def _heads(operator: OperatorShape) -> Heads:
    """Query heads in `batch`; key-value heads from the elements of Q, K, V and O together."""
    kv_heads = operator.elements // (2 * operator.rows * operator.inner) - operator.batch
    kv_heads = max(1, kv_heads)
    return Heads(
        kv_heads, max(1, operator.batch // kv_heads), operator.rows, operator.columns, operator.inner
    )
