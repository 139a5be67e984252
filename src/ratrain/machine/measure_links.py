"""Measures the links between the ranks of an initialised process group: α-β a kind and group size, and
compute under communication. Imports torch when called; every rank calls the same function.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.machine.collectives import Kind, collective
from ratrain.machine.platform import Link
from ratrain.machine.profile import Communication

if TYPE_CHECKING:
    from torch import Tensor

KINDS: tuple[Kind, ...] = ("p2p", "reduce_scatter", "all_gather", "all_reduce")
SIZES = (4_096, 65_536, 524_288, 4_194_304)
_IDEAL = Link(latency=0.0, bandwidth=1.0)
_MATMUL = 512
_ALONE = 16
"""Matmuls without company."""
_BUSY_ELEMENTS = 4_000_000


def measure_links(
    group_sizes: Sequence[int], sizes: Sequence[int] = SIZES, rounds: int = 7
) -> tuple[Communication, ...]:
    """α and β of every kind, among the first n ranks for each n of `group_sizes` (p2p: ranks 0 and 1).

    `sizes` are bytes of the whole buffer, fp32. All ranks return the same, slowest-rank medians.
    """
    import torch.distributed as dist

    results = []
    for n in group_sizes:
        group = dist.new_group(list(range(n)))
        for kind in KINDS if n == 2 else KINDS[1:]:
            points = [(size, _timed(kind, n, size, group, rounds)) for size in sizes]
            sent = [collective(kind, "pairwise", n, size, _IDEAL).bytes_per_member for size, _ in points]
            alpha, bandwidth = fit_line(sent, [seconds for _, seconds in points])
            results.append(Communication(kind, n, alpha, bandwidth))
    return tuple(results)


def fit_line(sent: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(α, bandwidth) of seconds = α + bytes / bandwidth: least squares on relative errors, α at least 0."""
    x, y = np.asarray(sent, dtype=float), np.asarray(seconds, dtype=float)
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    alpha, slope = np.linalg.lstsq(design, np.ones_like(x), rcond=None)[0]
    if alpha < 0 or slope <= 0:
        # One of the two cannot be told from zero: let the larger transfers say the bandwidth.
        alpha, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    return float(alpha), float(1 / slope)


def measure_interference(rounds: int = 7) -> tuple[float, float]:
    """How much longer a matmul takes beside an all-gather over all ranks, and how much longer that all-gather
    takes beside matmuls; each at least 1, the slowest rank's median. A thread runs the transfer, as in a run.
    """
    import torch
    import torch.distributed as dist

    left = torch.randn(_MATMUL, _MATMUL)
    world = dist.get_world_size()
    gather = _operation("all_gather", world, torch.zeros(_BUSY_ELEMENTS), dist.get_rank(), dist.new_group())
    gather()
    compute, transfer = [], []
    for _ in range(rounds):
        dist.barrier()
        gather_alone = _seconds(gather)
        dist.barrier()
        matmul_alone = _matmul_seconds(left, lambda count: count < _ALONE)
        dist.barrier()
        took: list[float] = []
        thread = threading.Thread(target=lambda took=took: took.append(_seconds(gather)))
        thread.start()
        matmul_beside = _matmul_seconds(left, lambda _: thread.is_alive())  # noqa: B023
        thread.join()
        compute.append(matmul_beside / matmul_alone)
        transfer.append(took[0] / gather_alone)
    slowest = torch.tensor([statistics.median(compute), statistics.median(transfer)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    first, second = slowest.tolist()
    return max(1.0, first), max(1.0, second)


def _seconds(operation: Callable[[], object]) -> float:
    begin = time.perf_counter()
    operation()
    return time.perf_counter() - begin


def _matmul_seconds(left: Tensor, again: Callable[[int], bool]) -> float:
    """Mean seconds a matmul, at least one, for as long as `again(count)`."""
    count, begin = 0, time.perf_counter()
    while True:
        left @ left
        count += 1
        if not again(count):
            return (time.perf_counter() - begin) / count


def _timed(kind: Kind, n: int, size: int, group: Any, rounds: int) -> float:
    """Median over rounds of the slowest rank's seconds; every rank of the world returns it."""
    import torch
    import torch.distributed as dist

    rank, samples = dist.get_rank(), []
    buffer = torch.ones(max(n, size // 4 // n * n))
    operation = _operation(kind, n, buffer, rank, group) if rank < n else None
    for number in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        if operation is not None:
            operation()
        elapsed = torch.tensor(time.perf_counter() - begin if operation is not None else 0.0)
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
