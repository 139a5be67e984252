"""Scale-out: what is left of the throughput per cluster as clusters are added at a constant load each.

Three causes of loss are computed, at strengths that are stated and not fitted:
- jitter: actions take exp(N(0, sigma)) times their seconds. One replica is simulated under several seeds, and the
  step of D replicas, which meet in every step, is the expected longest of D such steps;
- growth of collectives: they are rings, whose latency grows with D; the latency of a hop is varied;
- spread: clusters differ in speed for good, and the step is that of the slowest of all.
Expected extremes are those of normal draws (Blom 1958).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ratrain.machine.platform import Platform
from ratrain.plan.compute import Compute
from ratrain.plan.costs import Costs
from ratrain.plan.plan import Plan
from ratrain.plan.reproduce.cells import Cell, Table
from ratrain.plan.reproduce.rows import StepRow
from ratrain.plan.reproduce.setting import Setting
from ratrain.program.graph import lower
from ratrain.simulate.cost import Jitter
from ratrain.simulate.simulator import simulate

SEEDS = tuple(range(8))


class Cause(NamedTuple):
    """jitter  sigma of each action's seconds
    hops    multiplies the platform file's latency of a hop
    spread  standard deviation of a cluster's speed
    """

    jitter: float = 0.0
    hops: float = 1.0
    spread: float = 0.0

    def __str__(self) -> str:
        return f"jitter {self.jitter:.0%}, latency x{self.hops:g}, spread {self.spread:.0%}"


REPORTED = Cause(0.05, 1, 0.0)
CAUSES = (
    Cause(),
    REPORTED,
    Cause(0.2),
    Cause(0.05, 30),
    Cause(0.05, 50),
    Cause(0.05, 1, 0.02),
    Cause(0.05, 1, 0.08),
)
"""The others show how strong a cause would have to be to explain what is published."""


def scaling(setting: Setting) -> Table:
    """Throughput per cluster over that on the fewest, published and under every case."""
    rows = sorted((row for row in setting.rows.step if row.scales), key=lambda row: row.devices)
    plans = [setting.plan_of(row) for row in rows]
    cells = []
    for cause in CAUSES:
        times = [_longest(setting, row, plan, cause) for row, plan in zip(rows, plans)]
        base = _rate(rows[0], times[0])
        for row, seconds in zip(rows, times):
            paper = _rate(row, row.step(setting.rows.sequence)) / _rate(
                rows[0], rows[0].step(setting.rows.sequence)
            )
            ours = _rate(row, seconds) / base
            cells.append(
                Cell(row.name, str(cause), "%", ours, paper, row.reading, note=f"step {seconds:.2f} s")
            )
    words = (
        f"Seeds {SEEDS[0]} to {SEEDS[-1]}. Ours is {REPORTED}; the other lines show what a cause of that strength "
        "would do.",
    )
    return Table("scaling", "Scale-out, throughput per cluster", tuple(cells), words)


def expected_longest(samples: Sequence[float], count: int) -> float:
    """The expected longest of `count` normal draws with the samples' mean and deviation."""
    mean, deviation = statistics.fmean(samples), statistics.pstdev(samples)
    return mean + deviation * normal_extreme(count)


def normal_extreme(count: int) -> float:
    """The expected largest of `count` standard normal draws (Blom, 1958)."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def _longest(setting: Setting, row: StepRow, plan: Plan, cause: Cause) -> float:
    """Seconds of the step of all clusters."""
    compute = _slower_links(setting.compute, cause.hops)
    costs = Costs(setting.spec(row.model), plan, compute)
    program = plan.program("steady")
    graph = lower(program)
    jitters = [Jitter(seed, cause.jitter) for seed in SEEDS] if cause.jitter else [None]
    steps = [simulate(program, costs, costs.ports, jitter=j, graph=graph).step for j in jitters]
    return expected_longest(steps, plan.data) * (1 + cause.spread * normal_extreme(plan.ranks))


def _slower_links(compute: Compute, hops: float) -> Compute:
    """The same prices where a message takes longer to arrive."""
    platform = compute.source
    assert isinstance(platform, Platform)
    within = platform.within_node
    source = replace(
        platform,
        within_node=None if within is None else replace(within, latency=within.latency * hops),
        between_nodes=replace(platform.between_nodes, latency=platform.between_nodes.latency * hops),
    )
    other = compute.at(compute.efficiency)
    other.source = source
    return other


def _rate(row: StepRow, seconds: float) -> float:
    """Sequences a second and cluster."""
    return row.global_batch / seconds / row.devices
