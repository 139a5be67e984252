"""What `ratrain plan` answers: plans, tables and reasons; the command prints them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ratrain.config import Config, format_bytes
from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec
from ratrain.plan.compute import Compute
from ratrain.plan.explain import Rejection, impossible, reasons_for, recovery_words, rejections
from ratrain.plan.grouping import regrouped
from ratrain.plan.plan import Plan
from ratrain.plan.recipes import recipe
from ratrain.plan.request import Request, check_layers, read_request
from ratrain.plan.resolve import compute_of, explicit
from ratrain.plan.search import Result, search
from ratrain.plan.simulated import with_time

_FIELDS = {
    "P": "pipeline",
    "D": "data",
    "T": "tensor",
    "ZeRO": "zero",
    "zero": "zero",
    "micro": "micro_batch",
}
"""What `--explain` may fix, and the field of a request that it sets."""


@dataclass(frozen=True)
class Answer:
    """best        the plan, with its reasons
    table       the best plans, fastest first
    rejected    why not the others
    searched    seconds the search took, and how many layouts it considered
    compared    with --explain: the best of all layouts, which `best` is held against
    """

    best: Plan
    table: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    searched: tuple[float, int]
    compared: Plan | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain form."""
        return {
            "plan": self.best.to_json(),
            "table": [summary(plan) for plan in self.table],
            "rejected": [{"kind": r.kind, "sentence": r.sentence} for r in self.rejected],
            "search_seconds": self.searched[0],
            "layouts": self.searched[1],
            "compared": summary(self.compared) if self.compared else None,
        }


def plan_command(config: Config, spec: ModelSpec, args: argparse.Namespace) -> Answer:
    """Plans a run on `args.devices` devices (None: as configured). UserError if nothing fits, with what
    would; a recipe that does not fit is an answer without a time."""
    begin = time.perf_counter()
    request = read_request(config, spec, args.devices)
    compute = compute_of(request)
    if args.recipe and args.explain:
        raise UserError("--recipe and --explain: a recipe is one layout; give one of the two")
    if args.recipe:
        best = recipe(args.recipe, request, compute).with_(why=(f"the recipe {args.recipe}",))
        return Answer(best, (best,), (), (time.perf_counter() - begin, 1))
    if args.explain:
        return _explained(request, compute, args, begin)
    if not request.open:
        best = with_time(explicit(request), spec, compute)
        return Answer(best, (best,), (), (time.perf_counter() - begin, 1))
    result = search(request, compute, simulated=max(1, args.top))
    return _answer(request, compute, result, begin)


def fixed(request: Request, text: str) -> Request:
    """The request with what "P=4,D=64" fixes; UserError for anything else."""
    changes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if (
            name not in _FIELDS
            or not equals
            or not value.isdigit()
            or (name.lower() != "zero" and value == "0")
        ):
            raise UserError(
                f"--explain {part.strip()!r}: expected NAME=NUMBER with a name of {', '.join(_FIELDS)}, "
                "such as P=4,D=64"
            )
        changes[_FIELDS[name]] = int(value)
    asked = replace(request, **changes)  # type: ignore[arg-type]
    check_layers(asked.spec, asked.layers, asked.pipeline)
    return asked


def summary(plan: Plan) -> dict[str, Any]:
    """A row of the table, in seconds and bytes."""
    forecast = plan.forecast
    assert forecast is not None
    return {
        "pipeline": plan.pipeline,
        "data": plan.data,
        "tensor": plan.tensor,
        "zero": plan.zero,
        "micro_batch": plan.micro_batch,
        "layers": list(plan.layers),
        "recovery": [recovery_words(_of_layers(plan, s)) for s in range(plan.pipeline)],
        "idle": plan.idle,
        "step_s": forecast.step,
        "tokens_per_s": tokens_per_second(plan),
        "exposed_s": forecast.exposed,
        "tail_s": forecast.tail,
        "bubble": forecast.bubble,
        "peak_bytes": forecast.peak,
    }


def tokens_per_second(plan: Plan) -> float:
    """Tokens that an update covers, over its step."""
    assert plan.forecast is not None and plan.forecast.step is not None
    return plan.global_batch * plan.seq_len / plan.forecast.step


def headline(plan: Plan) -> str:
    """The plan in a line."""
    forecast = plan.forecast
    assert forecast is not None and forecast.step is not None
    tensor = f" x {plan.tensor} tensor ranks" if plan.tensor > 1 else ""
    return (
        f"{plan.pipeline} stages x {plan.data} replicas{tensor}, ZeRO-{plan.zero}, micro-batch "
        f"{plan.micro_batch} x {plan.micro_batches}: {forecast.step:.4g} s a step, "
        f"{tokens_per_second(plan):,.0f} tokens/s, {forecast.bubble:.1%} of the devices' time not forward or "
        f"backward"
    )


def comparison(plan: Plan, best: Plan) -> str:
    """A plan against the best of all."""
    assert plan.forecast and best.forecast and plan.forecast.step and best.forecast.step
    ratio = plan.forecast.step / best.forecast.step
    if ratio <= 1:
        return "no other layout is faster"
    return (
        f"{ratio:.2f}x the best layout's {best.forecast.step:.4g} s (P={best.pipeline}, D={best.data}, "
        f"T={best.tensor}, ZeRO-{best.zero}, micro-batch {best.micro_batch})"
    )


def plan_table(plans: Sequence[Plan]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows, a plan each."""
    header = (
        "P",
        "D",
        "T",
        "ZeRO",
        "micro",
        "layers",
        "recovered",
        "step s",
        "tokens/s",
        "exposed",
        "tail s",
        "peak",
    )
    rows: list[tuple[object, ...]] = []
    for plan in plans:
        f = plan.forecast
        assert f is not None and f.step is not None and f.exposed is not None and f.tail is not None
        layers = [rung for s in range(plan.pipeline) for rung in _of_layers(plan, s)]
        dropped = sum(rung != "keep" for rung in layers)
        rows.append(
            (
                plan.pipeline,
                plan.data,
                plan.tensor,
                plan.zero,
                plan.micro_batch,
                short(plan.layers),
                f"{dropped}/{len(layers)}",
                f"{f.step:.4g}",
                f"{tokens_per_second(plan):,.0f}",
                f"{f.exposed / f.step:.1%}",
                f"{f.tail:.3g}",
                format_bytes(f.peak),
            )
        )
    return header, rows


def stage_table(plan: Plan) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows, a stage each: where its memory goes."""
    header = (
        "stage",
        "layers",
        "recovery",
        "states",
        "activations",
        "logits",
        "buffers",
        "total",
        "of budget",
    )
    rows: list[tuple[object, ...]] = []
    assert plan.forecast is not None
    for s, m in enumerate(plan.forecast.memory):
        states = m.views + m.gradients + m.shard
        rows.append(
            (
                s,
                plan.layers[s],
                recovery_words(_of_layers(plan, s)),
                format_bytes(states),
                format_bytes(m.activations),
                format_bytes(m.logits),
                format_bytes(m.communication + m.gathered + m.unreduced + m.runtime),
                format_bytes(m.total),
                f"{m.total / plan.budget:.0%}",
            )
        )
    return header, rows


def short(layers: Sequence[int]) -> str:
    """E.g. "4x3,5,4" for 4, 4, 4, 5, 4."""
    groups = [(count, len(list(group))) for count, group in groupby(layers)]
    return ",".join(str(count) if times == 1 else f"{count}x{times}" for count, times in groups)


def _of_layers(plan: Plan, stage: int) -> list[str]:
    """Rungs of the stage's decoder layers."""
    blocks = plan.layout().stages[stage]
    return [rung for block, rung in zip(blocks, plan.rungs[stage]) if block.startswith("layer")]


def _answer(request: Request, compute: Compute, result: Result, begin: float) -> Answer:
    if not result.plans:
        raise UserError(impossible(request, compute, result))
    result = replace(result, plans=regrouped(result.plans, request, compute))
    best = result.plans[0]
    best = best.with_(why=(*reasons_for(best, result), *best.why))
    considered = len(result.placed) + len(result.bounded)
    return Answer(best, result.plans, tuple(rejections(result)), (time.perf_counter() - begin, considered))


def _explained(request: Request, compute: Compute, args: argparse.Namespace, begin: float) -> Answer:
    asked = fixed(request, args.explain)
    ranks = (asked.pipeline or 1) * (asked.data or 1) * (asked.tensor or 1)
    if ranks > request.devices:
        raise UserError(
            f"--explain {args.explain}: needs {ranks} devices, there are {request.devices}; set --devices"
        )
    result = search(asked, compute, simulated=max(1, args.top))
    answer = _answer(asked, compute, result, begin)
    overall = search(request, compute, simulated=3)
    return replace(answer, compared=overall.plans[0] if overall.plans else None)
