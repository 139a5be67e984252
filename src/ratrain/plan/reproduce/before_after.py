"""One step of the paper's schedule and of the same layout without its passes, as timelines to draw."""

from __future__ import annotations

from dataclasses import dataclass

from ratrain.plan.fit import with_memory
from ratrain.plan.reproduce.setting import Setting, describe
from ratrain.plan.simulated import simulate_plan
from ratrain.program.timeline import Timeline

MICRO_BATCHES = 2
"""Micro-batches a stage: a short step, in which fill, drain and tail can be seen."""


@dataclass(frozen=True)
class BeforeAfter:
    """title     what was simulated
    timelines  by "passes off" and "all passes"
    """

    title: str
    timelines: dict[str, Timeline]


def before_after(setting: Setting) -> BeforeAfter:
    """Of the first model row whose pipeline has more than two stages, else of the first."""
    rows = setting.rows.model
    row = next((r for r in rows if r.pipeline > 2), rows[0])
    after = setting.plan("paper", row.model, row.devices, row.global_batch, pipeline=row.pipeline, tensor=1)
    spec = setting.spec(row.model)
    plans = {"passes off": with_memory(after.with_(passes=()), spec), "all passes": after}
    shown = min(MICRO_BATCHES * after.pipeline, after.micro_batches)
    timelines = {
        name: simulate_plan(plan, spec, setting.compute, shown).timeline for name, plan in plans.items()
    }
    return BeforeAfter(f"{row.model}, {describe(after)}, {shown} micro-batches", timelines)
