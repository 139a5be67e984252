"""Why a plan, and why not another: sentences with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ratrain.config import format_bytes
from ratrain.plan.compute import Compute
from ratrain.plan.fit import round_up
from ratrain.plan.placement import balanced_layers
from ratrain.plan.plan import Plan
from ratrain.plan.request import Request
from ratrain.plan.search import Candidate, Result, candidate, shapes
from ratrain.plan.shape import LAYER, Shape
from ratrain.program.layout import HEAD

_LINES = 8
"""Sentences of a kind, at most."""


@dataclass(frozen=True)
class Rejection:
    """Layouts that were not taken. `kind` is memory, slower or bound."""

    kind: str
    sentence: str


def reasons_for(plan: Plan, result: Result) -> tuple[str, ...]:
    """Why this plan, a sentence a choice."""
    return tuple(_reasons(plan, result))


def rejections(result: Result) -> list[Rejection]:
    """Why not the others: the nearest miss of each pipeline depth that does not fit, the best of each that is
    slower, and how many were ruled out by their lower bound."""
    best = result.placed[0] if result.placed and result.placed[0].time else None
    return [*_too_large(result), *_slower(result, best), *_bounded(result, best)]


def impossible(request: Request, compute: Compute, result: Result, *, to_run: bool = False) -> str:
    """One line: nothing fits, the nearest miss, and what would do."""
    what = f"no layout of {request.devices} devices"
    if not result.placed:
        return (
            f"{what} divides train.global_batch {request.global_batch} of {request.spec.layers} layers as "
            "parallel.* and train.micro_batch ask; leave some at auto"
        )
    nearest = min(result.placed, key=lambda c: c.peak)
    budget = smallest_budget(result)
    devices = smallest_devices(request, compute, to_run)
    more = f", or {devices} devices" if devices else ""
    return (
        f"{what} fits {format_bytes(request.target.memory)} each; nearest: {_overflow(nearest)}; "
        f"machine.memory of {format_bytes(round_up(budget))} would do{more}"
    )


def smallest_budget(result: Result) -> int:
    """The least memory per device under which some shape that did not fit would."""
    misfits = sorted((c for c in result.placed if c.time is None), key=lambda c: c.peak)[:_LINES]
    best = misfits[0].peak
    for miss in misfits:
        low, high = miss.shape.request.target.memory, best
        if not _fits_within(miss.shape, high):
            continue
        while high - low > high // 1000:
            middle = (low + high) // 2
            if _fits_within(miss.shape, middle):
                high = middle
            else:
                low = middle
        best = high
    return best


def smallest_devices(request: Request, compute: Compute, to_run: bool = False) -> int | None:
    """The fewest devices on which something fits; None if not even 64 times as many would do."""
    low, high = request.devices, request.devices
    while not _any_fits(request, compute, high, to_run):
        low, high = high, 2 * high
        if high > 64 * request.devices:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if _any_fits(request, compute, middle, to_run):
            high = middle
        else:
            low = middle
    return high


def recovery_words(rungs: Sequence[str]) -> str:
    """E.g. "3 inputs, 7 keep" of a stage's layers."""
    return ", ".join(f"{len(list(group))} {rung}" for rung, group in groupby(rungs)) or "no layers"


def _reasons(plan: Plan, result: Result) -> Iterator[str]:
    forecast = plan.forecast
    assert forecast is not None
    fullest = max(range(plan.pipeline), key=lambda s: forecast.memory[s].total)
    yield (
        f"fullest is stage {fullest}: {format_bytes(forecast.memory[fullest].total)} of "
        f"{format_bytes(plan.budget)}"
    )
    if plan.idle:
        yield (
            f"{plan.idle} of {plan.devices} devices stay idle: {plan.pipeline} stages x {plan.data} replicas"
            f"{f' x {plan.tensor} tensor ranks' if plan.tensor > 1 else ''} are {plan.ranks}, and the replicas "
            f"must divide the {plan.global_batch // plan.micro_batch} micro-batches of an update"
        )
    mine = next((c for c in result.placed if c.time and _same(c, plan)), None)
    if mine is None:
        return
    shape = mine.shape
    head, layer = shape.seconds(HEAD), shape.seconds(LAYER)
    worth = (head.forward + head.backward) / (layer.forward + layer.backward)
    if len(set(plan.layers)) > 1:
        yield (
            f"layers {'/'.join(map(str, plan.layers))}: the head takes as long as {worth:.1f} layers, and early "
            f"stages hold up to {min(plan.pipeline, plan.micro_batches)} micro-batches"
        )
    recovering = [s for s, stage in enumerate(mine.stages) if stage.recover]
    if recovering:
        worst = max(recovering, key=lambda s: mine.stages[s].recover)
        stage = mine.stages[worst]
        yield (
            f"recovery on {len(recovering)} of {plan.pipeline} stages; stage {worst} ({recovery_words(stage.rungs)}) "
            f"takes {stage.recover / (stage.forward + stage.backward):.0%} longer a micro-batch"
        )
    else:
        yield "every activation is kept: nothing has to be recovered"
    if "layerwise_sync" not in plan.passes and "layerwise_sync" in shape.request.passes:
        yield "reductions block: two units' unreduced gradients beside computation would not fit"
    others = [c for c in result.placed if c.key[:3] == mine.key[:3] and c.key[3] != plan.zero]
    for level in sorted({c.shape.zero for c in others}):
        other = min(
            (c for c in others if c.shape.zero == level), key=lambda c: c.time.step if c.time else 1e99
        )
        if other.time is None:
            yield f"ZeRO-{plan.zero} because {_overflow(other)}"
        elif mine.time and other.time.step > mine.time.step:
            more = other.time.step - mine.time.step
            yield f"ZeRO-{plan.zero} because ZeRO-{level} would take {more:.2f} s longer"
    occupied = max(stage.links / stage.busy for stage in mine.stages)
    if occupied > 0:
        yield f"reductions and gathers fill a stage's links for {occupied:.0%} of its time, under computation"


def _same(c: Candidate, plan: Plan) -> bool:
    return (c.key, c.layers) == (
        (plan.pipeline, plan.data, plan.tensor, plan.zero, plan.micro_batch),
        plan.layers,
    )


def _too_large(result: Result) -> Iterator[Rejection]:
    fitting = {c.shape.pipeline for c in result.placed if c.time is not None}
    misfits = [c for c in result.placed if c.time is None]
    misfits.sort(key=lambda c: (c.shape.pipeline in fitting, c.shape.pipeline, c.peak))
    seen: set[tuple[int, int]] = set()
    for miss in misfits:
        key = (miss.shape.pipeline, miss.shape.zero)
        if key not in seen and len(seen) < _LINES:
            seen.add(key)
            yield Rejection("memory", _overflow(miss))
    if len(misfits) > len(seen):
        yield Rejection("memory", f"{len(misfits) - len(seen)} further layouts do not fit")


def _slower(result: Result, best: Candidate | None) -> Iterator[Rejection]:
    if best is None or best.time is None:
        return
    seen = {best.shape.pipeline}
    for other in result.placed:
        if other.time is None or other.shape.pipeline in seen or len(seen) > _LINES:
            continue
        seen.add(other.shape.pipeline)
        parts = {
            "its slowest stage computes": other.time.steady - best.time.steady,
            "filling and draining the pipeline takes": other.time.fill - best.time.fill,
            "reductions, updates and gathers expose": other.time.tail - best.time.tail,
        }
        cause = max(parts, key=lambda name: parts[name])
        more = other.time.step / best.time.step - 1
        yield Rejection(
            "slower", f"{name_of(other.shape)}: {more:.1%} slower; {cause} {parts[cause]:.2f} s more"
        )


def _bounded(result: Result, best: Candidate | None) -> Iterator[Rejection]:
    if not result.bounded or best is None or best.time is None:
        return
    seen = {c.shape.pipeline for c in result.placed}
    for shape, seconds in result.bounded:
        if shape.pipeline not in seen and len(seen) < _LINES + len({c.shape.pipeline for c in result.placed}):
            seen.add(shape.pipeline)
            yield Rejection("bound", f"{name_of(shape)}: {_at_least(seconds, best.time.step)}")
    shape, seconds = result.bounded[0]
    yield Rejection("bound", f"{len(result.bounded):,} layouts in all: {_at_least(seconds, best.time.step)}")


def _at_least(seconds: float, best: float) -> str:
    return f"at least {seconds:.4g} s ({seconds / best:.2f}x) however placed"


def name_of(shape: Shape) -> str:
    """E.g. "P=4, D=64, ZeRO-1, micro-batch 2"."""
    tensor = f", T={shape.tensor}" if shape.tensor > 1 else ""
    return f"P={shape.pipeline}, D={shape.data}{tensor}, ZeRO-{shape.zero}, micro-batch {shape.micro_batch}"


def _overflow(miss: Candidate) -> str:
    """E.g. "P=2, D=4, ZeRO-1, micro-batch 1: stage 1 needs 24.10 GB of 20.00 GB; states 20.10 GB, activations
    4.00 GB"."""
    worst = max(range(len(miss.stages)), key=lambda s: miss.stages[s].total)
    total = miss.stages[worst].total
    shape = miss.shape
    held = shape.states.stage(miss.layers[worst], worst == 0, worst == shape.pipeline - 1)
    states = held.views + held.gathered + held.gradients + held.unreduced + held.shard
    return (
        f"{name_of(shape)}: stage {worst} needs {format_bytes(total)} of "
        f"{format_bytes(shape.request.target.memory)}; states {format_bytes(states)}, activations "
        f"{format_bytes(total - held.constant)}"
    )


def _fits_within(shape: Shape, budget: int) -> bool:
    request = replace(shape.request, target=replace(shape.request.target, memory=budget))
    again = replace(shape, request=request)
    if request.layers is not None:
        return candidate(again).time is not None
    return balanced_layers(again) is not None


def _any_fits(request: Request, compute: Compute, devices: int, to_run: bool) -> bool:
    """Whether a layout of least memory fits on that many devices: one sequence at a time, all sharded."""
    least = replace(
        request,
        devices=devices,
        micro_batch=request.micro_batch or 1,
        zero=3 if request.zero is None else request.zero,
    )
    return any(candidate(shape).time is not None for shape in shapes(least, compute, to_run))
