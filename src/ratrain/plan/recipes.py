"""Named ways to lay out training, each as a plan of any model on any machine: RATrain's own, the paper's, and
what people would use instead. They share operators, links and memory model, and differ in what is fixed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ratrain.errors import UserError
from ratrain.model.tensor_slice import divides
from ratrain.plan.compute import Compute
from ratrain.plan.fit import fits
from ratrain.plan.placement import even_layers
from ratrain.plan.plan import Plan
from ratrain.plan.request import Request
from ratrain.plan.search import Candidate, replicas, search
from ratrain.plan.simulated import with_time
from ratrain.program.passes import PASSES

Policy = Mapping[str, str]

KEEP: Policy = MappingProxyType({"default": "keep"})
INPUTS: Policy = MappingProxyType({"default": "inputs"})
"""Every decoder layer is dropped to its input."""
CHECKPOINT: Policy = MappingProxyType({"default": "inputs", "head": "inputs"})
"""The head as well, as checkpointing of a whole stage does."""

_STATE_PASSES = ("layerwise_sync", "update_prefetch")
_WIDEST = 8
"""Tensor ranks at most, where devices do not share nodes."""


@dataclass(frozen=True)
class Recipe:
    """What a recipe fixes of a request. Of several values the fastest that fits is taken.

    passes    lifecycle passes
    policies  recovery; None: as little as memory needs
    levels    ZeRO levels
    pipeline  stages where the request leaves them open; None: powers of two
    tensor    whether tensor ranks fill a node, where the request leaves them open; otherwise there are none
    """

    summary: str
    passes: tuple[str, ...]
    policies: tuple[Policy | None, ...] = (None,)
    levels: tuple[int, ...] = (1, 2, 3)
    pipeline: int | None = None
    tensor: bool = False


RATRAIN = "ratrain"

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "tp-heavy": Recipe("tensor parallel within a node, collectives block", (), tensor=True),
        "zero3-heavy": Recipe("ZeRO-3 without a pipeline, gathers block", (), levels=(3,), pipeline=1),
        "backward-checkpoint": Recipe(
            "everything recovered right before its backward", _STATE_PASSES, (CHECKPOINT,)
        ),
        "full-save": Recipe("nothing recovered", tuple(PASSES), (KEEP,), (1, 2)),
        "tuned": Recipe("the best PP/DP/ZeRO, lifecycle passes off", (), (KEEP, CHECKPOINT), (1, 2)),
        "baseline-1f1b": Recipe("1F1B, recovery as memory needs, lifecycle passes off", (), levels=(1, 2)),
        "paper": Recipe(
            "even placement, inputs kept (or everything, where it fits), all passes",
            tuple(PASSES),
            (INPUTS, KEEP),
        ),
    }
)
"""All but `ratrain`, which is the planner's own answer. All place layers evenly. Where levels stop at ZeRO-2, the
paper's numbers say so: what it tuned is slower than its ZeRO-3, and keeping everything ran out of memory."""

NAMES = (*RECIPES, RATRAIN)


def recipe(
    name: str, request: Request, compute: Compute, *, to_run: bool = False, simulated: int = 3
) -> Plan:
    """The fastest plan of the recipe `name` for `request`, with its forecast.

    What the request fixes (pipeline, data, tensor, micro-batch, ...) stays fixed; passes, recovery and ZeRO level
    are the recipe's. Where nothing fits, the plan that comes nearest is returned: `fit.fits` is false of it,
    its forecast has bytes and no step.

    to_run     only layouts that this version can run on exactly these devices
    simulated  how many of the layouts estimated best are simulated
    Raises UserError for an unknown name, or where the model and devices allow no such layout at all.
    """
    if name not in NAMES:
        raise UserError(f"no recipe {name!r}; expected one of {', '.join(NAMES)}")
    if name == RATRAIN:
        result = search(request, compute, to_run=to_run, simulated=simulated)
        if result.plans:
            return result.plans[0]
        found = list(result.placed)
    else:
        found = [
            candidate
            for each in _requests(RECIPES[name], request)
            for candidate in search(each, compute, to_run=to_run, simulated=0).placed
        ]
    if not found:
        raise UserError(
            f"{name}: no such layout of {request.spec.layers} layers on {request.devices} devices; "
            "give other devices or another global batch"
        )
    return _fastest(found, compute, simulated)


def _fastest(found: list[Candidate], compute: Compute, simulated: int) -> Plan:
    """The fastest in simulation of those estimated best; the smallest if none fits."""
    timed: list[tuple[float, Plan]] = []
    for each in sorted((c for c in found if c.time), key=lambda c: (c.time.step, c.key)):  # type: ignore[union-attr]
        plan = each.plan()
        if not fits(plan):
            continue
        plan = with_time(plan, each.shape.request.spec, compute)
        assert plan.forecast is not None and plan.forecast.step is not None
        timed.append((plan.forecast.step, plan))
        if len(timed) == simulated:
            break
    if timed:
        return min(timed, key=lambda entry: entry[0])[1]
    return min(found, key=lambda c: (c.peak, c.key)).plan()


def _requests(fixed: Recipe, request: Request) -> Iterator[Request]:
    """The request under every choice that the recipe leaves."""
    tensor = request.tensor
    if tensor is None:
        tensor = _node(request) if fixed.tensor else 1
    for pipeline in _depths(fixed, request, tensor):
        layers = request.layers or even_layers(pipeline, request.spec.layers)
        for zero in fixed.levels:
            for policy in fixed.policies:
                yield replace(
                    request,
                    pipeline=pipeline,
                    tensor=tensor,
                    layers=layers,
                    zero=zero,
                    passes=fixed.passes,
                    policy=None if policy is None else dict(policy),
                )


def _depths(fixed: Recipe, request: Request, tensor: int) -> list[int]:
    if request.pipeline is not None:
        return [request.pipeline]
    if fixed.pipeline is not None:
        return [fixed.pipeline]
    most = min(request.devices // tensor, request.spec.layers)
    depths = [2**n for n in range(most.bit_length())]
    return [p for p in depths if replicas(request, p, tensor, request.micro_batch or 1) is not None]


def _node(request: Request) -> int:
    """Tensor ranks that fill a node and divide the model; where devices are nodes of their own, as many as are
    common."""
    platform = request.target.platform
    per_node = 1 if platform is None else platform.devices_per_node
    most = min(request.devices, per_node if per_node > 1 else _WIDEST)
    found = next((t for t in (8, 4, 2) if t <= most and divides(request.spec, t)), None)
    if found is None:
        raise UserError(
            f"tp-heavy: no 2, 4 or 8 tensor ranks within {most} devices divide the model's heads and MLP columns; "
            "set parallel.tensor"
        )
    return found
