"""From a configuration to the plan of a run: checks what is given, and plans what is left at auto."""

from __future__ import annotations

import os

from ratrain.config import Config
from ratrain.errors import UserError
from ratrain.machine.platform import LOCAL
from ratrain.model.spec import ModelSpec
from ratrain.plan.compute import Compute
from ratrain.plan.explain import impossible, reasons_for
from ratrain.plan.fit import fits, require_fit, with_memory
from ratrain.plan.grouping import regrouped, with_grouping
from ratrain.plan.plan import Plan
from ratrain.plan.recipes import recipe
from ratrain.plan.request import Request, read_request
from ratrain.plan.search import search


def resolve(config: Config, spec: ModelSpec, *, devices: int | None = None) -> Plan:
    """The plan of a run on `devices` processes (None: see request.read_request), memory forecast included.

    Raises UserError with one line: layers or batch sizes that do not divide, more or fewer processes than the
    layout has, a budget that cannot hold it.
    """
    request = read_request(config, spec, devices)
    if not request.open:
        return with_grouping(explicit(request), request, compute_of(request))
    compute = compute_of(request)
    settled = None not in (request.pipeline, request.data, request.zero, request.micro_batch)
    result = search(request, compute, to_run=True, simulated=0 if settled else 10)
    if result.plans:
        best = regrouped(result.plans, request, compute)[0]
    else:
        fitting = (c.plan() for c in result.placed if c.time is not None)
        found = next((plan for plan in fitting if fits(plan)), None)
        if found is None:
            raise UserError(impossible(request, compute, result, to_run=True))
        best = with_grouping(found, request, compute)
    return best.with_(why=(*reasons_for(best, result), *best.why))


def named(name: str, config: Config, spec: ModelSpec, *, devices: int | None, to_run: bool) -> Plan:
    """The plan of the recipe `name` (see `recipes.RECIPES`); what the configuration fixes of the layout stays.

    to_run  only layouts on exactly these devices
    Raises UserError as `recipe` does, and with the bytes of the nearest layout where none fits.
    """
    request = read_request(config, spec, devices)
    plan = recipe(name, request, compute_of(request), to_run=to_run)
    require_fit(plan)
    return plan.with_(why=(f"the recipe {name}",))


def explicit(request: Request) -> Plan:
    """The plan of a request that leaves nothing open but whether anything is elided; UserError if it does not
    fit."""
    assert request.layers is not None and request.data and request.micro_batch
    assert request.zero is not None
    choices = [request.elide] if request.elide is not None else [True, False]
    plans = [
        with_memory(
            request.plan(
                layers=request.layers,
                data=request.data,
                zero=request.zero,
                micro_batch=request.micro_batch,
                tensor=request.tensor or 1,
                elide=elide,
            ),
            request.spec,
        )
        for elide in choices
    ]
    plan = next((plan for plan in plans if fits(plan)), plans[-1])
    require_fit(plan)
    return plan.with_(why=("an explicit layout",))


def compute_of(request: Request) -> Compute:
    """What prices a request: its profile or its platform. On this machine, not measured, processes share cores."""
    compute = Compute(request.target.source, request.precision.view)
    platform = request.target.platform
    if platform is not None and platform.name == LOCAL:
        cores = len(os.sched_getaffinity(0))
        return compute.at(compute.efficiency * min(1.0, cores / request.devices))
    return compute
