"""A plan's time, from simulating its program."""

from __future__ import annotations

from ratrain.model.spec import ModelSpec
from ratrain.plan.compute import Compute
from ratrain.plan.costs import Costs
from ratrain.plan.forecast import Forecast
from ratrain.plan.plan import Plan
from ratrain.program.passes import build
from ratrain.simulate.simulator import Simulation, simulate

_LONG = 4
"""A step of more than this many micro-batches a stage is simulated shorter and extended: once the pipeline is
full, every further micro-batch takes the same time."""


def simulate_plan(
    plan: Plan, spec: ModelSpec, compute: Compute, micro_batches: int | None = None
) -> Simulation:
    """The steady step of a plan, or of the same plan with fewer micro-batches."""
    layout = plan.layout()
    if micro_batches is not None:
        layout = layout.with_(microbatches=micro_batches)
    costs = Costs(spec, plan, compute)
    return simulate(build(layout, "steady", plan.passes), costs, costs.ports)


def with_time(plan: Plan, spec: ModelSpec, compute: Compute) -> Plan:
    """The plan with the simulated step in its forecast."""
    assert plan.forecast is not None
    total, depth = plan.micro_batches, plan.depth
    if total <= _LONG * depth + 1:
        run = simulate_plan(plan, spec, compute)
        step, exposed = run.step, run.exposed_mean
    else:
        short, run = (simulate_plan(plan, spec, compute, n * depth) for n in (_LONG - 1, _LONG))
        more = (total - _LONG * depth) / depth
        step = run.step + more * (run.step - short.step)
        exposed = run.exposed_mean + more * (run.exposed_mean - short.exposed_mean)
    busy = _computing(plan, spec, compute)
    bubble = 1 - sum(busy) / (len(busy) * step)
    forecast = Forecast(plan.forecast.memory, step, exposed, run.tail, bubble, compute.basis)
    return plan.with_(forecast=forecast)


def _computing(plan: Plan, spec: ModelSpec, compute: Compute) -> list[float]:
    """Per stage, seconds of a step spent in forwards and backwards."""
    costs = Costs(spec, plan, compute)
    table = []
    for blocks in plan.layout().stages:
        seconds = [costs.block(block) for block in blocks]
        table.append(plan.micro_batches * sum(s.forward + s.backward for s in seconds))
    return table
