"""The search: which layout of a request has the shortest step.

Shapes (everything but placement and rungs) are ordered by a lower bound of their time; each gets its best
placement under the memory model and a closed estimate; those estimated best are simulated. All of it is
deterministic, so that the same request gives the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ratrain.model.tensor_slice import divides
from ratrain.plan.compute import Compute
from ratrain.plan.estimate import Estimate, estimate, lower_bound
from ratrain.plan.fit import fits, with_memory
from ratrain.plan.placement import balanced_layers, even_layers, stages_of
from ratrain.plan.plan import Plan
from ratrain.plan.request import Request
from ratrain.plan.shape import Shape, Stage
from ratrain.plan.simulated import with_time

SIMULATED = 10
"""Candidates that are simulated: the table of the best ten."""

_WORTH, _ENOUGH = (1.25, 1.06), 12
"""A shape whose lower bound is more than this far above the best estimate is not placed: the wider margin until
enough others fit, the narrower, which covers what the estimate may be off, after that."""

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A shape with its placement; `time` is None if it does not fit, and then `stages` is the nearest miss."""

    shape: Shape
    layers: tuple[int, ...]
    stages: tuple[Stage, ...]
    time: Estimate | None

    @property
    def key(self) -> tuple[int, ...]:
        """What a reader tells layouts apart by."""
        s = self.shape
        return (s.pipeline, s.data, s.tensor, s.zero, s.micro_batch)

    @property
    def peak(self) -> int:
        """Bytes of its fullest stage."""
        return max(stage.total for stage in self.stages)

    def plan(self) -> Plan:
        """As a plan, memory forecast included."""
        shape, request = self.shape, self.shape.request
        choices: dict[str, object] = {"ahead": shape.ahead, "passes": shape.passes}
        if request.policy is None:
            last = len(self.stages) - 1
            choices["rungs"] = tuple(
                ("keep",) * (s == 0) + stage.rungs + ("keep",) * (s == last)
                for s, stage in enumerate(self.stages)
            )
        if request.elide is None:
            choices["elide"] = all(
                set(stage.rungs) <= {"keep"} for s, stage in enumerate(self.stages) if shape.elided(s)
            )
        plan = request.plan(
            layers=self.layers,
            data=shape.data,
            zero=shape.zero,
            micro_batch=shape.micro_batch,
            tensor=shape.tensor,
            slice_tokens=shape.slice_tokens,
            **choices,
        )
        return with_memory(plan, request.spec)


@dataclass(frozen=True)
class Result:
    """plans     the best, simulated, fastest first
    placed    every candidate that was placed, best first, misfits last
    bounded   shapes that their lower bound ruled out, with the bound
    """

    plans: tuple[Plan, ...]
    placed: tuple[Candidate, ...]
    bounded: tuple[tuple[Shape, float], ...]


def search(
    request: Request,
    compute: Compute,
    *,
    to_run: bool = False,
    simulated: int = SIMULATED,
) -> Result:
    """The best layouts of a request.

    to_run     only layouts that can be run on exactly these devices: none idle, and tensor ranks only if asked for
    simulated  how many candidates are simulated
    """
    bounds = [(lower_bound(shape), i, shape) for i, shape in enumerate(shapes(request, compute, to_run))]
    bounds.sort(key=lambda entry: entry[:2])
    placed, bounded = _place(bounds)
    timed: dict[Candidate, Plan | None] = {}
    _simulate(placed, timed, simulated, compute)
    best = min((_step(plan) for plan in timed.values() if plan), default=0.0)
    if bounded and bounded[0][1] < best:  # the estimate promised more than simulation keeps
        nearer = [(bound, i, shape) for i, (shape, bound) in enumerate(bounded) if bound < best]
        bounded = bounded[len(nearer) :]
        placed += [_variants(shape) for _, _, shape in nearer]
        _simulate(placed, timed, simulated, compute)
    plans = sorted((plan for plan in timed.values() if plan), key=_step)
    placed.sort(key=_rank)
    return Result(tuple(plans[:simulated]), tuple(placed), tuple(bounded))


def candidate(shape: Shape) -> Candidate:
    """The best placement of a shape; where none fits, the even one with the most recovery."""
    request = shape.request
    if request.layers is not None:
        layers: tuple[int, ...] | None = request.layers
    else:
        layers = balanced_layers(shape)
    if layers is None:
        layers = even_layers(shape.pipeline, request.spec.layers)
        return Candidate(shape, layers, tuple(stages_of(shape, layers)), None)
    stages = tuple(stages_of(shape, layers))
    over = max(stage.total for stage in stages) > request.target.memory
    return Candidate(shape, layers, stages, None if over else estimate(shape, stages))


def shapes(request: Request, compute: Compute, to_run: bool = False) -> Iterator[Shape]:
    """Every shape to consider: with reductions beside computation, and nothing recovered ahead."""
    for pipeline, degree, micro_batch in _grid(request, not to_run):
        data = replicas(request, pipeline, degree, micro_batch)
        if data is None or (to_run and pipeline * data * degree != request.devices):
            continue
        levels = (1, 2, 3) if request.zero is None else (request.zero,)
        for zero in levels[:1] if data == 1 else levels:
            shape = Shape(
                request, compute, pipeline, data, degree, zero, micro_batch, request.ahead or 0,
                request.passes, 0,
            )  # fmt: skip
            if shape.grouped == 1 or shape.groupable:
                yield shape


def replicas(request: Request, pipeline: int, tensor: int, micro_batch: int) -> int | None:
    """The most replicas that the devices and the global batch allow; None if there are none."""
    room = request.devices // (pipeline * tensor)
    if request.global_batch % micro_batch:
        return None
    sequences = request.global_batch // micro_batch
    if request.data is not None:
        return request.data if request.data <= room and sequences % request.data == 0 else None
    return next((d for d in range(min(room, sequences), 0, -1) if sequences % d == 0), None)


def _grid(request: Request, tensor: bool) -> Iterator[tuple[int, int, int]]:
    spec = request.spec
    most = min(request.devices, spec.layers + 2)
    pipelines = range(1, most + 1) if request.pipeline is None else (request.pipeline,)
    degrees = [1]
    platform = request.target.platform
    if request.tensor is not None:
        degrees = [request.tensor]
    elif tensor and platform is not None:  # beyond a node the links are no better than between stages
        degrees = [t for t in (1, 2, 4, 8) if t <= platform.devices_per_node and divides(spec, t)]
    sizes = _MICRO_BATCHES if request.micro_batch is None else (request.micro_batch,)
    for pipeline in pipelines:
        for degree in degrees:
            for micro_batch in sizes:
                yield pipeline, degree, micro_batch


def _place(
    bounds: list[tuple[float, int, Shape]],
) -> tuple[list[Candidate], list[tuple[Shape, float]]]:
    """Places shapes in the order of their lower bounds; those that are not worth it, with their bound."""
    placed: list[Candidate] = []
    bounded = []
    best, fit = float("inf"), 0
    for bound, _, shape in bounds:
        if bound > _WORTH[fit >= _ENOUGH] * best:
            bounded.append((shape, bound))
            continue
        found = _variants(shape)
        placed.append(found)
        if found.time is not None:
            best, fit = min(best, found.time.step), fit + 1
    return placed, bounded


def _simulate(
    placed: list[Candidate], timed: dict[Candidate, Plan | None], count: int, compute: Compute
) -> None:
    """Adds to `timed` the plans of the `count` candidates estimated best (None if one does not fit after all),
    and of further ones that by their estimate could still beat the best of these, up to as many again."""
    best, done = float("inf"), 0
    for each in sorted((c for c in placed if c.time is not None), key=_rank):
        assert each.time is not None
        if done >= count and (each.time.step > best or done >= 2 * count):
            break
        if each not in timed:
            plan = each.plan()  # block by block now; the shapes took all layers as equal
            timed[each] = with_time(plan, each.shape.request.spec, compute) if fits(plan) else None
        plan_or_none = timed[each]
        if plan_or_none is not None:
            best, done = min(best, _step(plan_or_none)), done + 1


def _rank(c: Candidate) -> tuple[bool, float, tuple[int, ...]]:
    """Fitting candidates by their estimate, then the others by what they need."""
    return (c.time is None, c.peak if c.time is None else c.time.step, c.key)


def _step(plan: Plan) -> float:
    assert plan.forecast is not None and plan.forecast.step is not None
    return plan.forecast.step


def _variants(shape: Shape) -> Candidate:
    """The best of a shape's ways to recover: none ahead of the gradient, or some; and, where per-micro-batch
    reductions fit only one unit at a time, those blocking."""
    first = candidate(shape)
    if first.time is None and shape.states.sharded_gradients and shape.overlapped:
        blocking = replace(shape, passes=tuple(p for p in shape.passes if p != "layerwise_sync"))
        tight = candidate(blocking)
        if tight.time is not None:
            first, shape = tight, blocking
    recovers = any(stage.recover for stage in first.stages)
    if first.time is None or not recovers or not shape.forward_side or shape.request.ahead is not None:
        return first
    options = [first, *(candidate(replace(shape, ahead=ahead)) for ahead in (1, 2))]
    return min((c for c in options if c.time is not None), key=lambda c: c.time.step)  # type: ignore[union-attr]
