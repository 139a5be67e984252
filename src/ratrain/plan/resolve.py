"""From a configuration to a plan: checks what is given, and fills in what is left at auto."""

from __future__ import annotations

from collections.abc import Iterator

from ratrain.config import Config, format_bytes
from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec
from ratrain.plan.fit import fits, overflow, require_fit, with_memory
from ratrain.plan.placement import even_layers
from ratrain.plan.plan import Plan, uniform_rungs
from ratrain.plan.request import Request, read_request
from ratrain.program.layout import RUNGS


def resolve(config: Config, spec: ModelSpec, *, devices: int | None = None) -> Plan:
    """The plan of a run on `devices` processes (None: see request.read_request), memory forecast included.

    An explicit layout is validated. What is left at auto is the first even layout that fits.
    Raises UserError with one line: layers or batch sizes that do not divide, more or fewer processes than the
    layout has, a budget that cannot hold it.
    """
    request = read_request(config, spec, devices)
    if request.tensor not in (None, 1):
        raise UserError(f"parallel.tensor = {request.tensor}: only 1 runs so far; set it to 1 or auto")
    return first_fit(request)


def first_fit(request: Request) -> Plan:
    """The first even layout that fits: few stages before many, keeping activations before recovering them.

    Raises UserError with the nearest miss.
    """
    nearest: Plan | None = None
    refusal: UserError | None = None
    for plan in even_layouts(request):
        if isinstance(plan, UserError):
            refusal = refusal or plan
            continue
        plan = with_memory(plan, request.spec)
        if fits(plan):
            return plan
        if nearest is None or plan.forecast.peak < nearest.forecast.peak:  # type: ignore[union-attr]
            nearest = plan
    if nearest is None:
        raise refusal or UserError(
            f"no layout of {request.devices} processes holds {request.spec.layers} layers with "
            f"train.global_batch {request.global_batch}; change one of them"
        )
    if not request.open:
        require_fit(nearest)
    raise UserError(
        f"no even layout of {request.devices} processes fits {format_bytes(request.target.memory)}; the "
        f"nearest: {overflow(nearest)}"
    )


def even_layouts(request: Request) -> Iterator[Plan | UserError]:
    """Even layouts of exactly `devices` processes, and what is wrong with those that are no plan."""
    spec = request.spec
    pipelines = (
        [request.pipeline] if request.pipeline else range(1, min(request.devices, spec.layers + 2) + 1)
    )
    for stages in pipelines:
        if request.devices % stages:
            continue
        data = request.data or request.devices // stages
        if stages * data != request.devices:
            continue
        layers = request.layers or even_layers(stages, spec.layers)
        for zero in (1, 2, 3) if request.zero is None else (request.zero,):
            for rungs in (
                [None] if request.policy is not None else [uniform_rungs(layers, rung) for rung in RUNGS]
            ):
                for elide in (True, False) if request.elide is None else (request.elide,):
                    choices = {"elide": elide} if rungs is None else {"elide": elide, "rungs": rungs}
                    try:
                        yield request.plan(
                            layers=layers, data=data, zero=zero, micro_batch=request.micro_batch or 1,
                            **choices,
                        )  # fmt: skip
                    except UserError as error:
                        yield error
