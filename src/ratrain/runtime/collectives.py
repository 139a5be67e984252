"""Collectives whose sums never depend on who arrives first.

gloo's own reduce-scatter sends as much as an all-reduce; made from point-to-point transfers it sends the
ideal (n-1)/n of the buffer, and the sum always runs in rank order from rank 0.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class RankOrderReducer:
    """Reduce-scatter, all-gather and pair sums over one process group.

    `group` may be None (one member): everything is then a no-op.
    """

    def __init__(self, group: dist.ProcessGroup | None, wire: torch.dtype | None = None) -> None:
        """wire: dtype on the wire; None: that of the buffer."""
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.me = 0 if group is None else dist.get_rank(group)
        self.ranks = [] if group is None else dist.get_process_group_ranks(group)
        self.wire = wire
        self._staging: Tensor | None = None

    def staging_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes of receive buffers for a buffer of `elements`."""
        return (self.size - 1) * (elements // self.size) * (self.wire or dtype).itemsize

    def reduce_scatter(self, buffer: Tensor) -> Tensor:
        """Sums slice `me` of the 1-D `buffer` over all members, in place; returns that slice.

        The other slices keep this rank's own values. `buffer` must divide by the group's size.
        """
        count = buffer.numel() // self.size
        own = buffer[self.me * count : (self.me + 1) * count]
        if self.group is None:
            return own
        wire = self.wire or buffer.dtype
        rows = self._buffers(self.size - 1, count, wire, buffer.device)
        peers = [k for k in range(self.size) if k != self.me]
        outgoing = [buffer[k * count : (k + 1) * count].to(wire) for k in peers]
        self.exchange(rows, outgoing, [self.ranks[k] for k in peers])
        if wire != buffer.dtype:
            own.copy_(own.to(wire))  # every rank's addend is rounded alike, so that all agree on the sum
        before, after = rows[: self.me], rows[self.me :]
        if len(before):
            total = before[0] if wire == buffer.dtype else before[0].to(buffer.dtype)
            for row in before[1:]:
                total += row
            own += total  # addition commutes: still ((x0 + x1) + ...) + x_me
        for row in after:
            own += row
        return own

    def all_gather(self, buffer: Tensor) -> None:
        """Fills the 1-D `buffer` with every member's slice, in place.

        Also made of transfers, straight into place: gloo's all-gather sends no more bytes, but took 1.5 times
        as long on a 450 Mbit/s link, because a round waits for the one before it.
        """
        if self.group is None:
            return
        slices = buffer.view(self.size, -1).unbind(0)
        peers = [k for k in range(self.size) if k != self.me]
        self.exchange(
            [slices[k] for k in peers], [slices[self.me]] * len(peers), [self.ranks[k] for k in peers]
        )

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum over all members in rank order, in place; bitwise the slices that `reduce_scatter` gives."""
        self.reduce_scatter(buffer)
        self.all_gather(buffer)

    def gather(self, vector: Tensor) -> Tensor:
        """Every member's 1-D vector of the same length, as rows in rank order."""
        return vector.unsqueeze(0) if self.group is None else gather_vectors(vector, self.group)

    def add_pair(self, piece: Tensor) -> None:
        """Sum of first and second member of a pair, in place. Two addends commute: no order to keep."""
        if self.group is None:
            return
        (incoming,) = self._buffers(1, piece.numel(), piece.dtype, piece.device)
        self.exchange([incoming], [piece], [self.ranks[1 - self.me]])
        piece += incoming

    def exchange(self, incoming: list[Tensor], outgoing: list[Tensor], ranks: list[int]) -> None:
        """One tensor from and one to each of `ranks`. Receives first: a gloo send waits for its receive."""
        works = [dist.irecv(t, src=rank, group=self.group) for t, rank in zip(incoming, ranks)]
        works += [dist.isend(t, dst=rank, group=self.group) for t, rank in zip(outgoing, ranks)]
        for work in works:
            assert work is not None, "this rank is not a member of its own group"
            work.wait()

    def _buffers(self, rows: int, count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Receive buffers, kept and reused: fresh pages cost more than the copy into them."""
        need = rows * count
        if self._staging is None or self._staging.numel() < need or self._staging.dtype != dtype:
            self._staging = None
            self._staging = torch.empty(need, dtype=dtype, device=device)
        return list(self._staging[:need].view(rows, count).unbind(0))


def gather_vectors(vector: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's 1-D vector of the same length, as rows in rank order."""
    size = dist.get_world_size(group)
    table = vector.new_empty(size * vector.numel())
    dist.all_gather_single(table, vector, group=group)
    return table.view(size, -1)
