"""`ratrain simulate`: the step drawn before it is run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ratrain.commands.arguments import add_recipe
from ratrain.commands.plan import add_request, requested


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_request(parser)
    add_recipe(parser)
    parser.add_argument("--out", type=Path, default=Path("simulation.html"), help="page to write")
    parser.add_argument("--json", action="store_true", help="print the forecast as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from ratrain.config import format_bytes
    from ratrain.plan.forecasting import forecast_step
    from ratrain.report.forecast import forecast_of
    from ratrain.report.html import write_simulation
    from ratrain.report.table import render_table
    from ratrain.run_folder import check_programs, resolve_plan

    config, spec = requested(args)
    plan = resolve_plan(config, spec, args.plan, args.devices, args.recipe)
    check_programs(plan, spec)
    result = forecast_step(plan, spec, config)
    step = result.simulation
    facts = {
        "step_s": step.step,
        "lower_bound_s": result.bound,
        "tokens_per_s": plan.global_batch * plan.seq_len / step.step,
        "exposed_mean_s": step.exposed_mean,
        "exposed_max_s": step.exposed_max,
        "tail_s": step.tail,
        "bubble": step.bubble,
        "exposed_by_cause_s": step.causes,
        "peak_bytes": list(step.peak),
        "basis": result.basis,
    }
    tensor = f" x {plan.tensor} tensor ranks" if plan.tensor > 1 else ""
    words = (
        f"{plan.pipeline} stages x {plan.data} replicas{tensor}, ZeRO-{plan.zero}: {step.step:.4g} s a step, "
        f"no program of this layout under {result.bound:.4g} s. {result.basis}."
    )
    write_simulation(forecast_of(plan, result), args.out, title=plan.model, words=words)
    if args.json:
        print(json.dumps(facts))
        return 0
    print(words)
    rows = [(cause, f"{s:.4g} s", f"{s / step.step:.1%}") for cause, s in sorted(step.causes.items())]
    print(render_table(("exposed on", "mean", "of the step"), rows))
    peaks = [(stage, format_bytes(peak), format_bytes(plan.budget)) for stage, peak in enumerate(step.peak)]
    print(render_table(("stage", "peak", "budget"), peaks))
    print(f"page {args.out}")
    return 0
