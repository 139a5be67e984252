"""Measures the links between the ranks of an initialised process group: α-β a kind and group size, and
compute under communication. Imports torch when called; every rank calls the same function.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
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


def measure_slowdown(rounds: int = 5) -> float:
    """How much longer a matmul takes while an all-gather over all ranks runs beside it; at least 1."""
    import torch
    import torch.distributed as dist

    left = torch.randn(_MATMUL, _MATMUL)
    shard = torch.zeros(_BUSY_ELEMENTS // dist.get_world_size())
    gathered = torch.empty(shard.numel() * dist.get_world_size())
    ratios = []
    for _ in range(rounds):
        dist.barrier()
        alone = _matmul_seconds(left, lambda count: count < 8)
        work: Any = dist.all_gather_single(gathered, shard, async_op=True)
        beside = _matmul_seconds(left, lambda count, work=work: not work.is_completed() and count < 200)  # type: ignore[misc]
        work.wait()
        ratios.append(beside / alone)
    slowest = torch.tensor(statistics.median(ratios))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1.0, float(slowest))


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


def _operation(kind: Kind, n: int, buffer: Tensor, rank: int, group: Any) -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    shards = buffer.chunk(n)
    if kind == "all_reduce":
        return lambda: _none(dist.all_reduce(buffer, group=group))
    if kind == "all_gather":
        shard = shards[rank].clone()
        return lambda: _none(dist.all_gather_single(buffer, shard, group=group))
    others = [peer for peer in range(n) if peer != rank]
    if kind == "p2p":
        # Both directions at once, as neighbouring stages use the link.
        sends, receives = (
            {peer: buffer for peer in others},
            {peer: torch.empty_like(buffer) for peer in others},
        )
    else:
        sends = {peer: shards[peer] for peer in others}
        receives = {peer: torch.empty_like(shards[rank]) for peer in others}

    def exchange() -> None:
        # Receives first: gloo's sends wait for the peer to have posted one.
        works: list[Any] = [dist.irecv(receives[peer], peer, group=group) for peer in others]
        works += [dist.isend(sends[peer], peer, group=group) for peer in others]
        for work in works:
            work.wait()
        if kind == "reduce_scatter":
            for peer in others:
                shards[rank].add_(receives[peer])

    return exchange


def _none(_: object) -> None:
    return None
