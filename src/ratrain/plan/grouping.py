"""How many micro-batches a plan groups at the ends of a step: as few as make its simulated step shortest.

Grouping trades memory and, in a pipeline, filling time for links that hide, so that only simulation can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ratrain.machine.platform import LOCAL
from ratrain.plan.compute import Compute
from ratrain.plan.fit import fits, with_memory
from ratrain.plan.plan import Plan
from ratrain.plan.request import Request
from ratrain.plan.simulated import with_time

_LIKE = 1.01
"""Steps this near each other count as equal: the one of less memory is taken."""

_MOST = 32
"""Larger groups are not tried."""


def with_grouping(plan: Plan, request: Request, compute: Compute) -> Plan:
    """The plan with the choice of `Plan.grouped` that simulation and the budget favour; the same where the
    request makes that choice, or where there is nothing to hide."""
    tried = list(_groupings(plan, request))
    if not tried:
        return plan
    timed = plan if _step(plan) else with_time(plan, request.spec, compute)
    options = [timed]
    for grouped in tried:
        option = with_memory(plan.with_(grouped=grouped, forecast=None), request.spec)
        if fits(option):
            options.append(with_time(option, request.spec, compute))
    best = min(_step(option) for option in options)
    chosen = next(option for option in options if _step(option) <= _LIKE * best)
    if chosen is timed:
        return plan
    gain = 1 - _step(chosen) / _step(timed)
    return chosen.with_(
        why=(
            *plan.why,
            f"{chosen.grouped} micro-batches grouped at the ends of a step: {gain:.0%} shorter, for what their "
            "activations take",
        )
    )


def regrouped(plans: Sequence[Plan], request: Request, compute: Compute) -> tuple[Plan, ...]:
    """Simulated plans, each grouped where that could make it the fastest; fastest first again."""
    best = min((_step(plan) for plan in plans), default=0.0)
    better = [with_grouping(plan, request, compute) if _least(plan) < best else plan for plan in plans]
    return tuple(sorted(better, key=_step))


def _groupings(plan: Plan, request: Request) -> Iterator[int]:
    """What there is to try, smallest first. Nothing by guessed costs: memory would be spent for sure."""
    settled = request.grouped is not None or request.target.name == LOCAL
    if settled or "grouped_ends" not in plan.passes or plan.data == 1:
        return
    if plan.layout().ungroupable is None:
        total = plan.micro_batches
        yield from sorted({k for k in (2, 4, 8, total) if 1 < k <= min(total, _MOST)})


def _step(plan: Plan) -> float:
    forecast = plan.forecast
    return (forecast.step if forecast else None) or 0.0


def _least(plan: Plan) -> float:
    """Seconds that would be left if nothing was exposed."""
    forecast = plan.forecast
    return _step(plan) - ((forecast.exposed if forecast else None) or 0.0)
