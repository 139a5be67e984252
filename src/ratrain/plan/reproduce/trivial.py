"""The trivial model, which a planner has to beat: one rate of operations, and the 1F1B bubble of equal stages."""

from __future__ import annotations

from ratrain.plan.reproduce.rows import StepRow
from ratrain.plan.reproduce.setting import Setting

_RECOVERS = ("backward-checkpoint", "tuned")
"""Recipes that run every forward twice."""


def trivial_step(setting: Setting, row: StepRow) -> float:
    """Seconds of a step, at the rate that makes the calibrating row's the published one."""
    known = setting.rows.calibrating
    return known.step(setting.rows.sequence) * _work(setting, row) / _work(setting, known)


def _work(setting: Setting, row: StepRow) -> float:
    """Floating-point operations for which a device is occupied in a step."""
    spec, sequence = setting.spec(row.model), setting.rows.sequence
    sample = sum(spec.forward_flops(block, 1, sequence) for block in spec.block_names())
    pipeline, tensor = row.pipeline or 1, row.tensor or 1
    passes = 4 if row.recipe in _RECOVERS else 3
    micro_batches = row.global_batch * pipeline * tensor / row.devices
    return passes * sample * row.global_batch / row.devices * (1 + (pipeline - 1) / micro_batches)
