"""Clock offsets between ranks, so that timelines of several hosts can be laid over each other."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ratrain.runtime.mesh import Mesh

_ROUNDS = 5


def offsets(mesh: Mesh) -> float:
    """Seconds to add to this rank's `time.perf_counter` to reach rank 0's. Called by all ranks together.

    Cristian's method: rank 0's answer is taken as of the middle of the shortest of a few round trips.
    """
    best, offset = float("inf"), 0.0
    for rank in range(1, mesh.size):
        if mesh.rank == rank:
            for _ in range(_ROUNDS):
                cell = torch.zeros(1, dtype=torch.float64)
                start = time.perf_counter()
                dist.send(cell, dst=0, group=mesh.world)
                dist.recv(cell, src=0, group=mesh.world)
                trip = time.perf_counter() - start
                if trip < best:
                    best, offset = trip, float(cell) - (start + trip / 2)
        elif mesh.rank == 0:
            for _ in range(_ROUNDS):
                cell = torch.zeros(1, dtype=torch.float64)
                dist.recv(cell, src=rank, group=mesh.world)
                cell.fill_(time.perf_counter())
                dist.send(cell, dst=rank, group=mesh.world)
    return offset
