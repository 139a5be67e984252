"""How fast a step is simulated, and how time and memory grow with the number of actions.

    python benchmarks/simulator_speed.py [--json]

Seconds of CPU after warm-up, from a built program: `lower` makes the integer arrays, `simulate` runs three
repetitions. Four layers a stage, all lifecycle passes, every block recovered, links shared.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import TypeVar

from ratrain.program.action import Action, Kind
from ratrain.program.checker import check
from ratrain.program.graph import lower
from ratrain.program.layout import Layout
from ratrain.program.passes import build
from ratrain.simulate.cost import Cost, Network
from ratrain.simulate.simulator import simulate

SIZES = ((2, 4), (4, 32), (8, 64), (16, 128), (16, 256), (32, 256), (64, 512))
SECONDS = {Kind.FORWARD: 1e-3, Kind.RECOVER: 1e-3, Kind.BACKWARD: 2.1e-3, Kind.UPDATE_SHARD: 3e-4}
Result = TypeVar("Result")


def cost(action: Action) -> Cost:
    """Round numbers: only their order of magnitude matters here."""
    if action.kind in SECONDS:
        return Cost(SECONDS[action.kind])
    out, into = (("out", action.stage), 1e6), (("in", action.stage), 1e6)
    if action.kind in (Kind.SEND_ACT, Kind.SEND_GRAD):
        return Cost(1e-5, (out,))
    if action.kind in (Kind.RECV_ACT, Kind.RECV_GRAD):
        return Cost(1e-5, (into,))
    return Cost(1e-5, (out, into))


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """The result of `work` and its seconds of CPU."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def measure(pipeline: int, microbatches: int, zero: int) -> dict[str, float]:
    """One row of the table."""
    layout = Layout.even(pipeline, 4 * pipeline, replicas=4, microbatches=microbatches, zero=zero)
    layout = layout.with_(rungs=tuple(tuple("inputs" for _ in blocks) for blocks in layout.stages))
    network = Network({(d, s): 1e9 for d in ("in", "out") for s in range(pipeline)}, slowdown=1.05)
    program, building = timed(lambda: build(layout))
    violations, checking = timed(lambda: check(program))
    assert not violations
    graph, lowering = timed(lambda: lower(program))
    _, simulating = timed(lambda: simulate(program, cost, network, graph=graph).step)
    return {
        "pipeline": pipeline,
        "microbatches": microbatches,
        "zero": zero,
        "actions": len(graph.actions),
        "build_s": building,
        "check_s": checking,
        "lower_s": lowering,
        "simulate_s": simulating,
        "simulate_us_per_action": 1e6 * simulating / len(graph.actions),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Prints the table; sizes grow, so the peak of a row is that of its own simulation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    arguments = parser.parse_args()
    measure(2, 4, 1)  # compiles
    rows = [measure(*size, zero) for size in SIZES for zero in (1, 3)]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("   P    M ZeRO  actions   build   check   lower simulate  us/action  peak RSS")
    for r in rows:
        print(
            f"{r['pipeline']:4} {r['microbatches']:4} {r['zero']:4} {r['actions']:8} {r['build_s']:6.2f}s "
            f"{r['check_s']:6.2f}s {r['lower_s']:6.2f}s {r['simulate_s']:7.3f}s "
            f"{r['simulate_us_per_action']:10.2f} {r['peak_rss_mb']:7.0f}MB"
        )


if __name__ == "__main__":
    main()
