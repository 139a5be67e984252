"""`ratrain check`: the programs of a run, checked, and a grid to look at."""

from __future__ import annotations

import argparse
import json

from ratrain.commands.arguments import positive
from ratrain.commands.plan import add_request, requested


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_request(parser)
    parser.add_argument("--columns", type=positive, default=40, help="width of the grid in units of time")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from ratrain.plan.memory import footprints
    from ratrain.program.grid import render
    from ratrain.program.memory import in_flight, peak
    from ratrain.run_folder import check_programs, resolve_plan

    config, spec = requested(args)
    plan = resolve_plan(config, spec, args.plan, args.devices)
    check_programs(plan, spec)
    program = plan.program("steady")
    peaks = [peak(program, s, f) for s, f in enumerate(footprints(spec, plan))]
    if args.json:
        stages = [
            {"stage": s, "in_flight": in_flight(program, s), "peak_bytes": p.total, "peak_at": str(p.action)}
            for s, p in enumerate(peaks)
        ]
        print(json.dumps({"legal": True, "actions": program.size(), "stages": stages}))
        return 0
    from ratrain.config import format_bytes

    print(render(program, columns=args.columns))
    for s, most in enumerate(peaks):
        print(
            f"stage {s}: {in_flight(program, s)} micro-batches in flight, "
            f"{format_bytes(most.total)} of {format_bytes(plan.budget)} at most, at {most.action}"
        )
    print(f"legal: {program.size():,} actions a replica; first, steady, flush and evaluate programs checked")
    return 0
