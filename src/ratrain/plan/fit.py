"""Whether a plan fits its budget, and the sentence if it does not."""

from __future__ import annotations

from ratrain.config import format_bytes
from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec
from ratrain.plan.forecast import Forecast, StageMemory
from ratrain.plan.memory import breakdown
from ratrain.plan.plan import Plan


def with_memory(plan: Plan, spec: ModelSpec) -> Plan:
    """The plan with its memory forecast; times that it already has are kept."""
    memory = breakdown(spec, plan)
    known = plan.forecast
    if known is None:
        return plan.with_(forecast=Forecast(memory))
    return plan.with_(
        forecast=Forecast(memory, known.step, known.exposed, known.tail, known.bubble, known.source)
    )


def fits(plan: Plan) -> bool:
    """Whether the forecast memory of every stage is within the budget."""
    assert plan.forecast is not None
    return plan.forecast.peak <= plan.budget


def require_fit(plan: Plan) -> None:
    """UserError if the budget cannot hold the plan: which rank, how much, the smallest that would."""
    if not fits(plan):
        raise UserError(
            f"{overflow(plan)}; the smallest machine.memory that would hold it is "
            f"{format_bytes(round_up(plan.forecast.peak))}"  # type: ignore[union-attr]
        )


def overflow(plan: Plan) -> str:
    """E.g. "P=4, ZeRO-1: stage 0 (rank 0) needs 21.30 GB of 20.00 GB; activations 9.10 GB, ..."."""
    assert plan.forecast is not None
    memory = plan.forecast.memory
    stage = max(range(len(memory)), key=lambda s: memory[s].total)
    return (
        f"P={plan.pipeline}, D={plan.data}, ZeRO-{plan.zero}: stage {stage} (rank {stage * plan.data}) needs "
        f"{format_bytes(memory[stage].total)} of {format_bytes(plan.budget)}; {largest_parts(memory[stage])}"
    )


def largest_parts(memory: StageMemory) -> str:
    """Its parts in words, the largest first: those that matter."""
    states = memory.views + memory.gathered + memory.gradients + memory.unreduced + memory.shard
    parts = {
        "states": states,
        "activations": memory.activations,
        "logits": memory.logits,
        "communication": memory.communication,
        "runtime": memory.runtime,
    }
    listed = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in listed if size >= memory.total // 100)


def round_up(size: int) -> int:
    """To the next hundredth of its unit, so that the figure as printed does hold."""
    step = next((unit // 100 for unit in (10**12, 10**9, 10**6, 10**3) if size >= unit), 1)
    return -(-size // step) * step
