"""A closed estimate of a step, to rank placements before any is simulated.

In 1F1B a stage is occupied by every micro-batch for its forward, backward and recovery; and it holds at most
P - s micro-batches, so that one round trip to the last stage and back feeds no more than that many. The first
micro-batch has to reach a stage, and the last one's gradient to return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratrain.plan.shape import LAYER, Shape, Stage
from ratrain.program.layout import EMBED, HEAD


@dataclass(frozen=True)
class Estimate:
    """steady  seconds in which the slowest stage computes its micro-batches
    fill    seconds more until the first micro-batch reaches it and the last one's gradient returns, or in
            which round trips keep it waiting
    tail    exposed seconds between two steps
    bound   the slowest stage
    """

    steady: float
    fill: float
    tail: float
    bound: int

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.steady + self.fill + self.tail


def estimate(shape: Shape, stages: Sequence[Stage]) -> Estimate:
    """The estimate of a placement."""
    total, message = shape.micro_batches, shape.message
    behind = not shape.forward_side or shape.ahead == 0  # recovery waits for the gradient
    trip = [stage.busy - (0.0 if behind else stage.recover) for stage in stages]
    before = 0.0
    occupied = []
    for index, stage in enumerate(stages):
        occupied.append(before + total * stage.busy)
        before += trip[index] + 2 * message
    whole = before - 2 * message
    cycle = max(stage.busy for stage in stages)
    if total > shape.pipeline:
        later = 0.0
        for index in reversed(range(len(stages))):
            later += trip[index] + (2 * message if index + 1 < len(stages) else 0.0)
            cycle = max(cycle, later / min(shape.pipeline - index, total))
    bound = max(range(len(stages)), key=lambda s: occupied[s])
    through = max(occupied[bound], whole + (total - 1) * cycle)
    steady = total * stages[bound].busy
    return Estimate(steady, through - steady, _tail(shape, stages), bound)


def lower_bound(shape: Shape) -> float:
    """Seconds below which no placement of the shape can be: the work shared out evenly, and one micro-batch's
    way through it."""
    layer, ends = shape.least_seconds(LAYER), [shape.least_seconds(EMBED), shape.least_seconds(HEAD)]
    work = shape.request.spec.layers * layer.least + sum(end.least for end in ends)
    cycle = max(work / shape.pipeline, ends[1].least, shape.least_links)
    return work + (shape.micro_batches - 1) * cycle


def _tail(shape: Shape, stages: Sequence[Stage]) -> float:
    """What of the first stage's reductions, updates and gathers stays exposed: it is the last to end a step
    and the first to begin one."""
    only = len(stages) == 1
    reduce, after = shape.state_seconds(len(stages[0].rungs), True, only)
    if not shape.overlapped:
        exposed = reduce
    else:  # all but the last unit's reduction runs under the last backward
        last_unit = shape.state_seconds(0, True, False)[0]
        exposed = max(last_unit, reduce - stages[0].backward)
    if not shape.gathers_ahead:
        return exposed + after
    first_unit = shape.state_seconds(0, True, False)[1]
    return exposed + max(first_unit, after - stages[0].forward)
