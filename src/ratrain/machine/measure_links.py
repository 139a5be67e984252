"""Measures the links between the ranks of an initialised process group, by kind, group size and bytes, and what
computing and transfers cost each other. Imports torch when called; every rank calls the same function.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from ratrain.machine.collectives import Kind, collective
from ratrain.machine.platform import Link
from ratrain.machine.profile import Communication

if TYPE_CHECKING:
    from torch import Tensor

KINDS: tuple[Kind, ...] = ("p2p", "reduce_scatter", "all_gather", "all_reduce")
SIZES = (4_096, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216)
_TOGETHER, _MOST_TIMES = 4_194_304, 32
"""Bytes that collectives move one after another, and how many at most."""
_IDEAL = Link(latency=0.0, bandwidth=1.0)
_PASSES = 3
"""Of computing, beside transfers and alone."""


def measure_links(
    group_sizes: Sequence[int], sizes: Sequence[int] = SIZES, rounds: int = 5
) -> tuple[Communication, ...]:
    """Every kind, among the first n ranks for each n of `group_sizes` (p2p: ranks 0 and 1).

    `sizes` are bytes of the whole buffer, fp32. All ranks return the same, slowest-rank medians.
    """
    import torch.distributed as dist

    results = []
    for n in group_sizes:
        group = dist.new_group(list(range(n)))
        for kind in KINDS if n == 2 else KINDS[1:]:
            points = []
            for size in sizes:
                sent = collective(kind, "pairwise", n, size, _IDEAL).bytes_per_member
                points.append((sent, _timed(kind, n, size, group, rounds)))
            results.append(Communication(kind, n, tuple(points)))
        _leave(group)
    return tuple(results)


def measure_interference(
    compute: Callable[[], object], elements: int, rounds: int = 3
) -> tuple[float, float]:
    """How much longer `compute` takes beside transfers, and how much longer transfers take beside `compute`; each at
    least 1, the slowest rank's median.

    Transfers are a reduce-scatter and an all-gather of `elements` fp32 over all ranks, in a thread as in a run.
    """
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    group, buffer = dist.new_group(), torch.ones(max(world, elements // world * world))
    operations = [_operation(kind, world, buffer, rank, group) for kind in ("reduce_scatter", "all_gather")]

    def transfer(times: int) -> float:
        """Seconds a round of operations."""
        begin = time.perf_counter()
        for _ in range(times):
            for operation in operations:
                operation()
        return (time.perf_counter() - begin) / times

    transfer(1)
    compute()
    # As many transfers as last for some passes of the slowest rank's computing.
    passes = torch.tensor(_PASSES * _seconds(compute) / transfer(1))
    dist.all_reduce(passes, dist.ReduceOp.MAX)
    times = max(1, math.ceil(float(passes)))
    slower, dragged = [], []
    for _ in range(rounds):
        dist.barrier()
        alone = transfer(times)
        dist.barrier()
        undisturbed = statistics.median(_seconds(compute) for _ in range(_PASSES))
        dist.barrier()
        with ThreadPoolExecutor(1) as pool:
            beside, disturbed = pool.submit(transfer, times), []
            while not beside.done():
                disturbed.append(_seconds(compute))
        # The last pass began beside transfers but ended alone.
        slower.append(statistics.mean(disturbed[:-1] or disturbed) / undisturbed)
        dragged.append(beside.result() / alone)
    slowest = torch.tensor([statistics.median(slower), statistics.median(dragged)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    _leave(group)
    first, second = slowest.tolist()
    return max(1.0, first), max(1.0, second)


def _leave(group: Any) -> None:
    """Ends a group of which this rank may not be a member: groups hold threads."""
    import torch.distributed as dist

    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)


def _seconds(operation: Callable[[], object]) -> float:
    begin = time.perf_counter()
    operation()
    return time.perf_counter() - begin


def _timed(kind: Kind, n: int, size: int, group: Any, rounds: int) -> float:
    """Median over rounds of the slowest rank's seconds; every rank of the world returns it."""
    import torch
    import torch.distributed as dist

    rank, samples = dist.get_rank(), []
    buffer = torch.ones(max(n, size // 4 // n * n))
    operation = _operation(kind, n, buffer, rank, group) if rank < n else None
    times = 1 if kind == "p2p" else min(max(1, _TOGETHER // size), _MOST_TIMES)
    for number in range(rounds + 1):
        dist.barrier()
        if operation is not None and kind != "p2p":
            operation()  # uses up the burst that a link lets pass after a pause: collectives follow each other
        begin = time.perf_counter()
        if operation is not None:
            for _ in range(times):
                operation()
        elapsed = torch.tensor((time.perf_counter() - begin) / times if operation is not None else 0.0)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        if number > 0:
            samples.append(float(elapsed))
    return statistics.median(samples)


def _operation(kind: Kind, n: int, buffer: Tensor, rank: int, group: Any) -> Callable[[], object]:
    """What a run does: the runtime's own collectives, and messages both ways at once, as neighbours send."""
    from ratrain.runtime.collectives import RankOrderReducer

    reducer = RankOrderReducer(group)
    if kind == "p2p":
        incoming = buffer.clone()
        return lambda: reducer.exchange([incoming], [buffer], [1 - rank])
    operations: dict[Kind, Callable[[Tensor], object]] = {
        "reduce_scatter": reducer.reduce_scatter,
        "all_gather": reducer.all_gather,
        "all_reduce": reducer.all_reduce,
    }
    return partial(operations[kind], buffer)
