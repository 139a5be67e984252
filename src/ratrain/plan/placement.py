"""How many decoder layers each stage gets."""

from __future__ import annotations


def even_layers(pipeline: int, layers: int) -> tuple[int, ...]:
    """Even placement, the remainder on the first stages. With more stages than layers the head gets a stage
    of its own, then the embedding; `pipeline` is at most `layers + 2`."""
    alone_last = pipeline > layers
    alone_first = pipeline > layers + 1
    stages = pipeline - alone_last - alone_first
    counts = [layers // stages + (s < layers % stages) for s in range(stages)]
    return (*([0] * alone_first), *counts, *([0] * alone_last))
