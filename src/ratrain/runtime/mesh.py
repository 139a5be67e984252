"""The device mesh: which rank is which stage, replica and tensor rank, and the process groups that it uses.

Tensor ranks of one replica are next to each other, then the replicas of a stage (rank = (stage * replicas + replica)
* tensor + part): with several devices in a node the heaviest traffic stays inside. All groups but `parts` and `world`
join ranks of the same part. Every kind of communication has a group of its own, because
within one gloo group an order mistake is silent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """One rank's place and groups. Passed explicitly; nothing here is global.

    tensor, part    tensor ranks of a replica, and which of them this is
    sync, prefetch  replicas of this stage; None with one replica
    tied            first and last stage of this replica; None elsewhere
    act, grad       the pipeline of this replica, one group per direction; None with one stage
    parts           tensor ranks of this stage and replica; None with one
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
    tensor: int = 1
    part: int = 0
    parts: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.rank_of(self.stage, self.replica)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.pipeline * self.replicas * self.tensor

    def rank_of(self, stage: int, replica: int) -> int:
        """Global rank of this part at (stage, replica)."""
        return (stage * self.replicas + replica) * self.tensor + self.part

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == self.pipeline - 1


def build_mesh(pipeline: int, replicas: int, rank: int, tied: bool, tensor: int = 1) -> Mesh:
    """Makes all process groups; every rank calls this with the same arguments but `rank`."""
    place, part = divmod(rank, tensor)
    stage, replica = divmod(place, replicas)

    def rank_at(s: int, r: int, p: int) -> int:
        return (s * replicas + r) * tensor + p

    def mine(wanted: bool, groups: Iterable[list[int]]) -> dist.ProcessGroup | None:
        """This rank's of disjoint groups. Every rank must take part in making every group, also those it is not
        in."""
        if not wanted:
            return None
        made = [(members, dist.new_group(members)) for members in groups]
        return next((group for members, group in made if rank in members), None)

    stages, copies, parts = range(pipeline), range(replicas), range(tensor)
    of_stage = [[rank_at(s, r, p) for r in copies] for s in stages for p in parts]
    of_replica = [[rank_at(s, r, p) for s in stages] for r in copies for p in parts]
    sync = mine(replicas > 1, of_stage)
    prefetch = mine(replicas > 1, of_stage)
    act = mine(pipeline > 1, of_replica)
    grad = mine(pipeline > 1, of_replica)
    ends = mine(tied and pipeline > 1, [[ranks[0], ranks[-1]] for ranks in of_replica])
    together = mine(tensor > 1, [[rank_at(s, r, p) for p in parts] for s in stages for r in copies])
    world = dist.new_group(list(range(pipeline * replicas * tensor)))
    return Mesh(
        pipeline, replicas, stage, replica, sync, prefetch, ends, act, grad, world, tensor, part, together
    )
