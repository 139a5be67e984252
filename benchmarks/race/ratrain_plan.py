"""RATrain's plan for a case, and what that plan says about memory. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from race.rows import Case
from ratrain.config import AUTO, Config, ParallelConfig, RecoveryConfig, parse_config
from ratrain.model.spec import ModelSpec
from ratrain.plan.fit import with_memory
from ratrain.plan.plan import Plan
from ratrain.plan.resolve import resolve


def plan_of(case: Case) -> Plan:
    """The plan that a user with this configuration would get."""
    if "plan" in case.options:
        return Plan.from_json(case.options["plan"], case.name)
    return resolve(config_of(case), case.model.spec(), devices=case.ranks)


def settled(case: Case) -> Case:
    """The case with the planner's own layout, if it leaves that to the planner (`options.planned`).

    Raises UserError if nothing fits.
    """
    if not case.options.get("planned"):
        return case
    config = config_of(case)
    config = replace(config, parallel=ParallelConfig(), recovery=RecoveryConfig())
    config = replace(config, train=replace(config.train, micro_batch=AUTO))
    plan = resolve(config, case.model.spec(), devices=case.ranks)
    rungs = {rung for blocks in plan.rungs for rung in blocks} - {"keep"}
    return replace(
        case,
        pipeline=plan.pipeline,
        data=plan.data,
        layers=plan.layers,
        zero=plan.zero,
        micro_batch=plan.micro_batch,
        micro_batches=plan.micro_batches,
        recover="/".join(sorted(rungs)) or "keep",
        options={**case.options, "plan": plan.to_json()},
    )


def config_of(case: Case) -> Config:
    """The run configuration that a user would write for it."""
    table: dict[str, Any] = {
        "model": {"config": "race"},
        "data": {"corpus": "race", "seq_len": case.model.seq_len},
        "train": {"global_batch": case.global_batch, "micro_batch": case.micro_batch, "clip": case.clip},
        "parallel": {
            "pipeline": case.pipeline,
            "data": case.data,
            "zero": case.zero,
            "layers": list(case.layers),
            "grouped": case.options.get("grouped", AUTO),
        },
        "recovery": {"policy": case.recover, **case.options.get("recovery", {})},
        "machine": {
            "devices": case.ranks,
            "memory": case.memory or "1 TB",
            "platform": case.options.get("platform", "local"),
        },
        "run": {"passes": case.options.get("passes", "all")},
    }
    return parse_config(table, case.name)


def working_set(plan: Plan, spec: ModelSpec) -> tuple[int, ...]:
    """Bytes per stage that a plan pays for passes which peers do not have: for recovery, and for the micro-batches
    in flight at grouped ends beyond those of 1F1B."""
    ungrouped = plan.with_(grouped=1, forecast=None)
    both = [with_memory(each, spec).forecast for each in (plan.with_(forecast=None), ungrouped)]
    grouped, alone = (forecast.memory for forecast in both if forecast is not None)
    return tuple(
        recovery + more.total - less.total
        for recovery, more, less in zip(_recovery_working_set(plan, spec), grouped, alone)
    )


def _recovery_working_set(plan: Plan, spec: ModelSpec) -> tuple[int, ...]:
    """Bytes per stage that recovery may hold on top of what its rungs keep: `ahead` micro-batches of the
    stage, and the larger of one block and, where the last one is never dropped, the stage."""
    layout, held = plan.layout(), []

    def dropped(block: str, rung: Any) -> int:
        sizes = (plan.micro_batch, plan.seq_len, plan.precision.view_bytes)
        return spec.saved_bytes(block, "keep", *sizes) - spec.saved_bytes(block, rung, *sizes)

    for stage, blocks in enumerate(layout.stages):
        parts = [dropped(block, layout.rung(stage, block)) for block in blocks]
        ahead = min(plan.ahead, layout.in_flight(stage) - 1)
        held.append(ahead * sum(parts) + max(sum(parts) if plan.elide else 0, *parts))
    return tuple(held)
