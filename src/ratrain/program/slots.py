"""Where units that come and go lie: one buffer a stage for gathered views, one for unreduced gradients.

Memory taken anew for every use leaves holes in the heap between smaller tensors that outlive it. No more than
WINDOW units exist whole at once, and they are neighbours in the order of use (`deps`): put at the two ends of one
buffer in turn, they never meet. The memory model prices the same buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ratrain.program.deps import WINDOW

_ALIGNED = 64
"""Elements to which a place is rounded, so that arithmetic on it runs as on memory of its own."""


@dataclass(frozen=True)
class Slots:
    """Where the units of a buffer lie. In elements.

    capacity   of the buffer
    starts     of each unit
    """

    capacity: int
    starts: tuple[int, ...]


def view_slots(sizes: Sequence[int], overlapped: bool) -> Slots:
    """Fixed places for gathered views: what autograd saved of a view must find the next gather's values there.

    sizes       elements of the units in the order of forward
    overlapped  whether a unit is gathered while another is read; else one is there at a time

    Neighbours are units that follow each other, and the last and the first, between the forwards of two
    micro-batches. An odd ring cannot alternate, so its smallest unit has a place of its own.
    """
    rounded = [_round(size) for size in sizes]
    if len(rounded) < 2 or not overlapped:
        return Slots(max(rounded, default=0), (0,) * len(rounded))
    apart = rounded.index(min(rounded)) if len(rounded) % 2 else None
    ring = [i for i in range(len(rounded)) if i != apart]
    if apart is not None:  # begin after it, so that the two beside it are at different ends
        ring = ring[apart:] + ring[:apart]
    shared = _two_ends([rounded[i] for i in ring])
    starts = [shared] * len(rounded)
    for position, i in enumerate(ring):
        starts[i] = 0 if position % 2 == 0 else shared - rounded[i]
    return Slots(shared + (rounded[apart] if apart is not None else 0), tuple(starts))


def gradient_capacity(sizes: Sequence[int], overlapped: bool) -> int:
    """Elements of a buffer for unreduced gradients, which are put at its two ends in turn (`gradient_start`).

    sizes       elements of the units in the order in which a backward opens them; then the first comes again
    overlapped  whether one is filled while another is reduced; else one is there at a time
    """
    rounded = [_round(size) for size in sizes]
    return _two_ends(rounded) if overlapped else max(rounded, default=0)


def gradient_start(capacity: int, size: int, opened: int) -> int:
    """First element of the gradient that is opened after `opened` others."""
    return 0 if opened % WINDOW == 0 else capacity - _round(size)


def _two_ends(sizes: Sequence[int]) -> int:
    """The most that two neighbours of a ring take."""
    assert WINDOW == 2
    return max((a + b for a, b in pairwise([*sizes, sizes[0]])), default=0) if sizes else 0


def _round(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
