"""`ratrain plan`: which layout, and why."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.commands.arguments import add_recipe, positive
from ratrain.config import Config, load_config
from ratrain.model.spec import ModelSpec

if TYPE_CHECKING:
    from ratrain.plan.command import Answer


def add_request(parser: argparse.ArgumentParser, plan_file: bool = True) -> None:
    """Arguments that several commands share: a run file, overrides, a plan, the number of devices."""
    parser.add_argument("run", metavar="RUN.toml", help="run configuration")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override a configuration value"
    )
    if plan_file:
        parser.add_argument("--plan", type=Path, help="use exactly this plan")
    parser.add_argument("--devices", type=positive, help="processes in all (machine.devices)")


def requested(args: argparse.Namespace) -> tuple[Config, ModelSpec]:
    """The configuration and model that `add_request`'s arguments name."""
    from ratrain.model.spec import load_spec

    config = load_config(Path(args.run), args.set)
    return config, load_spec(Path(config.model.config))


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_request(parser, plan_file=False)
    add_recipe(parser)
    # Here and not with the answer, whose imports would make --help slow.
    parser.add_argument(
        "--explain", metavar="P=4,D=64", help="answer for one layout: any of P, D, T, ZeRO, micro"
    )
    parser.add_argument("--top", type=positive, default=10, help="how many plans the table holds")
    parser.add_argument("--out", type=Path, help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from ratrain.plan.command import plan_command
    from ratrain.plan.fit import fits
    from ratrain.run_folder import check_programs

    config, spec = requested(args)
    answer = plan_command(config, spec, args)
    if not fits(answer.best):  # of a recipe that is a result
        print(json.dumps(answer.to_json()) if args.json else overflow_text(answer))
        return 1
    check_programs(answer.best, spec, whole=False)
    if args.out is not None:
        answer.best.save(args.out)
    print(json.dumps(answer.to_json()) if args.json else text(answer))
    return 0


def overflow_text(answer: Answer) -> str:
    """A recipe that does not fit, for people: which stage needs how much, and of what."""
    from ratrain.plan.command import stage_table
    from ratrain.plan.fit import overflow
    from ratrain.report.table import render_table

    name = answer.best.why[0]
    return f"{name} does not fit: {overflow(answer.best)}\n\n{render_table(*stage_table(answer.best))}"


def text(answer: Answer) -> str:
    """The answer for people."""
    from ratrain.plan.command import comparison, headline, plan_table, stage_table
    from ratrain.report.table import render_table

    best = answer.best
    assert best.forecast is not None
    parts = [headline(best), *(f"  {reason}" for reason in best.why)]
    if answer.compared is not None:
        parts.append(f"  {comparison(best, answer.compared)}")
    parts += ["", render_table(*stage_table(best)), ""]
    if len(answer.table) > 1:
        parts += [f"The best {len(answer.table)}:", render_table(*plan_table(answer.table)), ""]
    if answer.rejected:
        parts += ["Why not others:", *(f"  {r.kind}: {r.sentence}" for r in answer.rejected)]
    seconds, layouts = answer.searched
    parts.append(f"{layouts:,} layouts in {seconds:.1f} s; {best.forecast.source}")
    return "\n".join(parts)
