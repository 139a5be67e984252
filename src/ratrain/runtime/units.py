"""State units: flat buffers of parameters, their gradients, the shard this rank owns and its optimizer.

A unit's buffer holds its decayed parameters first, then the undecayed ones, then padding to a multiple of
the replicas. Rank r of D owns the r-th of D equal slices, so one message moves a shard; the slice contains at
most one stretch of each decay class, and AdamW sees at most two tensors.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ratrain.model.main_grad import attach_main_grad, expect_main_grad
from ratrain.model.spec import ParameterShape
from ratrain.program.slots import gradient_start
from ratrain.runtime.collectives import RankOrderReducer
from ratrain.runtime.shard_optimizer import AdamW, ShardOptimizer


@dataclass(frozen=True)
class Piece:
    """A stretch of one parameter inside this rank's shard.

    offset  first element within the flattened parameter
    start   first element within the shard
    """

    name: str
    offset: int
    start: int
    length: int


@dataclass(frozen=True)
class UnitFormat:
    """Precisions of a unit: what is read, where gradients accumulate, and what the optimizer keeps."""

    view: torch.dtype
    grad: torch.dtype
    wire: torch.dtype

    @property
    def master(self) -> torch.dtype:
        """fp32 under 16-bit views, else the view's own dtype."""
        return self.view if self.view in (torch.float32, torch.float64) else torch.float32


def padded(count: int, replicas: int) -> int:
    """Elements of a unit of `count` parameters, so that equal slices hold them."""
    return math.ceil(count / replicas) * replicas


class UnreducedGradients:
    """Memory for the whole gradients of single micro-batches (ZeRO-2, 3), used again and again.

    Who opens one must know that all but the newest have been reduced (`program.deps.WINDOW`).
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        """capacity: elements, see `program.slots.gradient_capacity`"""
        self._buffer = torch.zeros(capacity, dtype=dtype, device=device)
        self._opened = 0

    def open(self, size: int) -> Tensor:
        """1-D [size], of any content."""
        start = gradient_start(self._buffer.numel(), size, self._opened)
        self._opened += 1
        return self._buffer[start : start + size]


class StateUnit:
    """One unit on one rank: view, gradient, shard, optimizer.

    view      1-D [padded], what forward and backward read
    grad      1-D [padded] accumulator, or None while none exists (ZeRO-2, 3)
    master    1-D [shard], the weights that this rank updates; a slice of the view where dtypes agree
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[ParameterShape],
        zero: int,
        sync: RankOrderReducer,
        views: RankOrderReducer,
        formats: UnitFormat,
        adamw: AdamW,
        device: torch.device,
        place: Tensor | None = None,
        unreduced: UnreducedGradients | None = None,
        counts_in_norm: bool = True,
        counted_elsewhere: Collection[str] = (),
    ) -> None:
        """
        zero            level; 0 with one replica
        sync, views     gradients and views over the replicas (size 1 with one)
        place           1-D [padded], where the view lies between a gather and its release (ZeRO-3); None: a view
                        of its own, which stays
        unreduced       where the gradients of micro-batches lie (ZeRO-2, 3)
        counts_in_norm  False on the stage that holds the second copy of a tied matrix
        counted_elsewhere  parameters that another tensor rank has as well, and counts in the norm
        """
        self.name, self.zero, self.formats, self.sync, self.views = name, zero, formats, sync, views
        self.keeps_view, self.counts_in_norm = place is None, counts_in_norm
        self.counted_elsewhere = frozenset(counted_elsewhere)
        self.parameters = tuple(sorted(parameters, key=lambda p: not p.decay))
        self.decayed = sum(p.size for p in self.parameters if p.decay)
        self.count = sum(p.size for p in self.parameters)
        self.padded = padded(self.count, sync.size)
        share = self.padded // sync.size if zero > 0 else self.padded
        self.low = sync.me * share if zero > 0 else 0
        self.high = self.low + share
        self.offsets: dict[str, int] = {}
        at = 0
        for p in self.parameters:
            self.offsets[p.name] = at
            at += p.size
        self.view = torch.zeros(self.padded, dtype=formats.view, device=device) if place is None else place
        own = self.view[self.low : self.high]
        shares = formats.master == formats.view and self.keeps_view
        self.master = own if shares else torch.zeros(share, dtype=formats.master, device=device)
        self._bound: list[nn.Parameter] = []
        self._first_reader: list[bool] = []
        self.holders = 0
        # Unsharded gradients of micro-batches (ZeRO-2, 3): the last is being filled, those before it wait
        # for their reduction.
        self._places = unreduced
        self._unreduced: deque[Tensor] = deque()
        self._lock = threading.Lock()
        self.grad: Tensor | None = None
        self.shard_grad: Tensor | None = None
        self.shard_fresh = True
        if self.partial:
            self.shard_grad = torch.zeros(share, dtype=formats.grad, device=device)
        else:
            self.grad = torch.zeros(self.padded, dtype=formats.grad, device=device)
        decayed = min(max(self.decayed - self.low, 0), share)
        self.optimizer = ShardOptimizer(self.master, decayed, adamw)

    @property
    def partial(self) -> bool:
        """Whether only this rank's slice of the gradient outlives a micro-batch (ZeRO-2, 3)."""
        return self.zero >= 2 and self.sync.size > 1

    def parameter_views(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of the named parameters as windows of the view, also of one that is not there now."""
        shapes = {p.name: p for p in self.parameters}
        return {
            n: self.view[self.offsets[n] : self.offsets[n] + shapes[n].size].view(shapes[n].shape)
            for n in names
        }

    def attach(self, bound: dict[str, nn.Parameter], first_reader: bool) -> None:
        """Registers bound parameters of one reading block.

        first_reader  whether that block is the one whose backward runs first, and so overwrites
        """
        for name, parameter in bound.items():
            self._bound.append(parameter)
            self._first_reader.append(first_reader)
            parameter.ratrain_offset = self.offsets[name]  # type: ignore[attr-defined]
            expect_main_grad(parameter)
        if self.grad is not None:
            self._aim(self.grad)

    def open_gradient(self) -> None:
        """Makes the unsharded gradient of the micro-batch whose backward comes now (ZeRO-2, 3)."""
        if not self.partial:
            return
        assert self._places is not None
        gradient = self._places.open(self.padded)
        gradient[self.count :].zero_()
        with self._lock:
            self._unreduced.append(gradient)
            self.grad = gradient
            self._aim(gradient)

    def synchronise(self) -> None:
        """Sums the gradient over replicas in rank order: this rank's slice (ZeRO >= 1), or all of it."""
        gradient = self._unreduced[0] if self.partial else self.grad
        assert gradient is not None
        if self.zero == 0:
            self.sync.all_reduce(gradient)
            return
        own = self.sync.reduce_scatter(gradient)
        if self.partial:
            assert self.shard_grad is not None
            if self.shard_fresh:
                self.shard_grad.copy_(own)
                self.shard_fresh = False
            else:
                self.shard_grad += own

    def shard_gradient(self) -> Tensor:
        """1-D [shard], the gradient of the weights that this rank updates."""
        if self.shard_grad is not None:
            return self.shard_grad
        assert self.grad is not None
        return self.grad[self.low : self.high]

    def squared_norm(self) -> float:
        """Sum of squares of the shard's gradient in fp64. Over all ranks each element is counted once, or
        `replicas` times under ZeRO-0: the caller knows."""
        gradient = self.shard_gradient()
        if not self.counted_elsewhere:
            return squared_norm(gradient)
        own = (piece for piece in self.pieces() if piece.name not in self.counted_elsewhere)
        return math.fsum(squared_norm(gradient[piece.start : piece.start + piece.length]) for piece in own)

    def update(self, lr: float, scale: float) -> None:
        """One AdamW step on the shard; the gradient is multiplied by `scale` first (clipping, loss scale).

        Where the view is not the master itself, the own slice of the view is refreshed.
        """
        self.optimizer.step(self.shard_gradient(), lr, scale)
        self.publish()

    def publish(self) -> None:
        """Writes the master into the own slice of the view, unless it is that slice (or none exists)."""
        if self.keeps_view and self.master.data_ptr() != self.view[self.low :].data_ptr():
            self.view[self.low : self.high].copy_(self.master)

    def gather_view(self) -> None:
        """Fills the view from all owners.

        ZeRO-3: a view gathered for a backward may come while the forward before it still reads; the same values
        then go into the same memory.
        """
        if self.zero == 0:
            return
        if self.keeps_view:
            self.views.all_gather(self.view)
            return
        with self._lock:
            self.holders += 1
        # `data` has a version counter of its own: what autograd saved of this view has not changed.
        filled = self.view.data
        filled[self.low : self.high].copy_(self.master)
        self.views.all_gather(filled)

    def release_view(self) -> None:
        """ZeRO-3: ends what one gather began. After the last of them the memory is another unit's."""
        with self._lock:
            self.holders -= 1

    def release_microbatch_gradient(self) -> None:
        """ZeRO-2, 3: the unsharded gradient of the oldest micro-batch is not needed any more."""
        if not self.partial:
            return
        with self._lock:
            self._unreduced.popleft()
            if not self._unreduced:
                self.grad = None
                for parameter in self._bound:
                    parameter.main_grad = None  # type: ignore[attr-defined]

    def release_gradient(self) -> None:
        """The step's gradient has been used: the next contribution overwrites instead of adding."""
        self.shard_fresh = True
        if not self.partial:
            self._freshen()

    def pieces(self) -> list[Piece]:
        """Which stretches of which parameters this rank's shard holds, padding left out."""
        found = []
        for p in self.parameters:
            begin = self.offsets[p.name]
            low, high = max(begin, self.low), min(begin + p.size, self.high)
            if low < high:
                found.append(Piece(p.name, low - begin, low - self.low, high - low))
        return found

    def load_parameters(self, value: Callable[[ParameterShape], Tensor]) -> None:
        """Sets master (and view) from whole parameter values, one at a time."""
        with torch.no_grad():
            for p in self.parameters:
                begin = self.offsets[p.name]
                whole = value(p).reshape(-1)
                self.view[begin : begin + p.size].copy_(whole)
                low, high = max(begin, self.low), min(begin + p.size, self.high)
                if low < high:  # from the source, not from a rounded view
                    self.master[low - self.low : high - self.low].copy_(whole[low - begin : high - begin])

    def _aim(self, gradient: Tensor) -> None:
        for parameter, first in zip(self._bound, self._first_reader):
            low = parameter.ratrain_offset  # type: ignore[attr-defined]
            attach_main_grad(parameter, gradient[low : low + parameter.numel()].view(parameter.shape))
            parameter.main_grad_fresh = first  # type: ignore[attr-defined]

    def _freshen(self) -> None:
        for parameter, first in zip(self._bound, self._first_reader):
            parameter.main_grad_fresh = first  # type: ignore[attr-defined]


_ROW = 4096  # elements summed in the gradient's precision before fp64 takes over
_CHUNK = 1 << 20  # elements of a 16-bit gradient that are widened at a time


def squared_norm(gradient: Tensor) -> float:
    """Sum of squares of a 1-D tensor: rows in fp32 (fp64 for fp64), the sum over rows in fp64.

    `vector_norm(..., dtype=float64)` would make a copy of the whole gradient, at ten times the time.
    """
    if gradient.itemsize < 4:
        return sum(squared_norm(part.float()) for part in gradient.split(_CHUNK))
    whole = gradient.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(gradient[:whole].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(gradient[whole:])
    return float(rows.double().square().sum() + rest.double().square())
