"""How many decoder layers each stage gets."""

from __future__ import annotations

from ratrain.plan.shape import Shape, Stage


def even_layers(pipeline: int, layers: int) -> tuple[int, ...]:
    """Even placement, the remainder on the first stages. With more stages than layers the head gets a stage
    of its own, then the embedding; `pipeline` is at most `layers + 2`."""
    alone_last = pipeline > layers
    alone_first = pipeline > layers + 1
    stages = pipeline - alone_last - alone_first
    counts = [layers // stages + (s < layers % stages) for s in range(stages)]
    return (*([0] * alone_first), *counts, *([0] * alone_last))


def balanced_layers(shape: Shape) -> tuple[int, ...] | None:
    """The placement whose slowest stage is fastest, every stage on the least recovery that its memory allows;
    None if no placement fits.

    A stage's time and memory grow with its layers. So: give every stage all that fits, then take layers from
    whichever stage is the slowest (counted with what precedes it) until the right number is left.
    """
    pipeline, total = shape.pipeline, shape.request.spec.layers
    budget = shape.request.target.memory
    counts = []
    for index in range(pipeline):
        count = _most(shape, index, budget)
        if count is None:
            return None
        counts.append(count)
    surplus = sum(counts) - total
    if surplus < 0:
        return None
    least = [0 if s in (0, pipeline - 1) and pipeline > 1 else 1 for s in range(pipeline)]
    busy = [shape.stage(s, n).busy for s, n in enumerate(counts)]
    while surplus:
        _, _, slowest = max((busy[s], counts[s], s) for s in range(pipeline) if counts[s] > least[s])
        counts[slowest] -= 1
        busy[slowest] = shape.stage(slowest, counts[slowest]).busy
        surplus -= 1
    return tuple(counts)


def stages_of(shape: Shape, layers: tuple[int, ...]) -> list[Stage]:
    """Every stage of a placement."""
    return [shape.stage(s, count) for s, count in enumerate(layers)]


def _most(shape: Shape, index: int, budget: int) -> int | None:
    """The most layers that fit on a stage, at most what an even share could sensibly grow to."""
    total, pipeline = shape.request.spec.layers, shape.pipeline
    if pipeline == 1:
        return total if shape.stage(0, total).total <= budget else None
    inner = 1 if 0 < index < pipeline - 1 else 0
    most = min(total, -(-3 * total // (2 * pipeline)) + 2)
    low, high = inner - 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if shape.stage(index, middle).total <= budget:
            low = middle
        else:
            high = middle - 1
    return low if low >= inner else None
