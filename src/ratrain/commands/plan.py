"""`ratrain plan`: which layout, and why."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ratrain.commands.arguments import positive
from ratrain.config import Config, format_bytes, load_config
from ratrain.model.spec import ModelSpec


def add_request(parser: argparse.ArgumentParser) -> None:
    """Arguments that several commands share: a run file, overrides, a plan, the number of devices."""
    parser.add_argument("run", metavar="RUN.toml", help="run configuration")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override a configuration value"
    )
    parser.add_argument("--plan", type=Path, help="use exactly this plan")
    parser.add_argument("--devices", type=positive, help="processes in all (machine.devices)")


def requested(args: argparse.Namespace) -> tuple[Config, ModelSpec]:
    """The configuration and model that `add_request`'s arguments name."""
    from ratrain.model.spec import load_spec

    config = load_config(Path(args.run), args.set)
    return config, load_spec(Path(config.model.config))


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_request(parser)
    parser.add_argument("--out", type=Path, help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from ratrain.report.table import render_table
    from ratrain.run_folder import check_programs, resolve_plan

    config, spec = requested(args)
    plan = resolve_plan(config, spec, args.plan, args.devices)
    check_programs(plan, spec)
    if args.out is not None:
        plan.save(args.out)
    if args.json:
        print(json.dumps(plan.to_json()))
        return 0
    print(
        f"P={plan.pipeline} D={plan.data} ZeRO-{plan.zero}, layers {'/'.join(map(str, plan.layers))}, "
        f"micro-batch {plan.micro_batch} x {plan.micro_batches}"
    )
    for reason in plan.why:
        print(reason)
    assert plan.forecast is not None
    rows = [
        (
            s,
            plan.layers[s],
            ",".join(sorted(set(plan.rungs[s]))),
            format_bytes(m.total),
            format_bytes(plan.budget),
        )
        for s, m in enumerate(plan.forecast.memory)
    ]
    print(render_table(("stage", "layers", "recovery", "memory", "budget"), rows))
    return 0
