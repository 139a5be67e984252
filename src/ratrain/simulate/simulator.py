"""simulate(program, cost, network): the forecast of a step."""

from __future__ import annotations

from collections.abc import Sequence

from ratrain.program.graph import Graph, lower
from ratrain.program.memory import Footprint
from ratrain.program.program import Program
from ratrain.simulate.cost import CostOf, Jitter, Network
from ratrain.simulate.result import Simulation
from ratrain.simulate.tables import tabulate


def simulate(
    program: Program,
    cost: CostOf,
    network: Network,
    *,
    footprints: Sequence[Footprint] | None = None,
    jitter: Jitter | None = None,
    steps: int = 3,
    graph: Graph | None = None,
) -> Simulation:
    """Forecasts when each action of `program` starts and ends.

    A `steady` program repeats `steps` times and the last whole step is reported: with 3, the first warms up,
    the second is measured up to the first forwards of the third. Other forms run once.

    footprints  one per stage; needed for live bytes and peaks
    graph       `lower(program)` if it is at hand
    Raises ValueError for `steps` below 2 or an impossible cost; RuntimeError for a program that deadlocks.
    """
    if steps < 2:
        raise ValueError(f"a step time takes at least 2 steps, not {steps}")
    from ratrain.simulate.engine import run  # compiled code: loaded when it is first needed

    graph = lower(program) if graph is None else graph
    repeats = steps if program.form == "steady" else 1
    tables, kind = tabulate(graph, cost, network, program.floating, jitter, repeats)
    arrived, start, end, turn, stood = run(repeats, *tables)
    if not arrived:
        raise RuntimeError("the program deadlocks; check(program) says where")
    shape = (repeats, len(graph.actions))
    return Simulation(
        program=program,
        graph=graph,
        kind=kind,
        start=start.reshape(shape),
        end=end.reshape(shape),
        turn=turn.reshape(shape),
        stood=stood.reshape(shape),
        first_forward=tables.first_forward,
        footprints=None if footprints is None else tuple(footprints),
    )
