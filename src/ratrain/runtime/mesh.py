"""The device mesh: which rank is which stage and replica, and the process groups that it uses.

Ranks of one stage are neighbours (rank = stage * replicas + replica): with several devices in a node the
heavy traffic, gradients and views, stays inside. Every kind of communication has a group of its own, because
within one gloo group an order mistake is silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """One rank's place and groups. Passed explicitly; nothing here is global.

    sync, prefetch  replicas of this stage; None with one replica
    tied            first and last stage of this replica; None elsewhere
    act, grad       the pipeline of this replica, one group per direction; None with one stage
    world           all ranks
    """

    pipeline: int
    replicas: int
    stage: int
    replica: int
    sync: dist.ProcessGroup | None
    prefetch: dist.ProcessGroup | None
    tied: dist.ProcessGroup | None
    act: dist.ProcessGroup | None
    grad: dist.ProcessGroup | None
    world: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.rank_of(self.stage, self.replica)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.pipeline * self.replicas

    def rank_of(self, stage: int, replica: int) -> int:
        """Global rank at (stage, replica)."""
        return stage * self.replicas + replica

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == self.pipeline - 1


def build_mesh(pipeline: int, replicas: int, rank: int, tied: bool) -> Mesh:
    """Makes all process groups; every rank calls this with the same arguments but `rank`."""
    stage, replica = divmod(rank, replicas)

    def mine(
        wanted: bool, members: Callable[[int], list[int]], count: int, own: int
    ) -> dist.ProcessGroup | None:
        """Every rank must take part in making every group, also those it is not in."""
        if not wanted:
            return None
        groups = [dist.new_group(members(i)) for i in range(count)]
        return groups[own]

    def replicas_of(s: int) -> list[int]:
        return [s * replicas + r for r in range(replicas)]

    def pipeline_of(r: int) -> list[int]:
        return [s * replicas + r for s in range(pipeline)]

    sync = mine(replicas > 1, replicas_of, pipeline, stage)
    prefetch = mine(replicas > 1, replicas_of, pipeline, stage)
    act = mine(pipeline > 1, pipeline_of, replicas, replica)
    grad = mine(pipeline > 1, pipeline_of, replicas, replica)
    ends = mine(tied and pipeline > 1, lambda r: [r, (pipeline - 1) * replicas + r], replicas, replica)
    world = dist.new_group(list(range(pipeline * replicas)))
    at_end = stage in (0, pipeline - 1)
    return Mesh(
        pipeline, replicas, stage, replica, sync, prefetch, ends if at_end else None, act, grad, world
    )
