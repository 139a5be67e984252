"""`ratrain reproduce`: the paper's tables beside ours."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.commands.arguments import positive

if TYPE_CHECKING:
    from ratrain.plan.reproduce.cells import Table
    from ratrain.plan.reproduce.curves import Curves


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--only", action="append", metavar="TABLE", help="only this table; may be repeated")
    parser.add_argument(
        "--measured",
        action="store_true",
        help="also run the small wall-clock versions here (about 10 minutes)",
    )
    parser.add_argument(
        "--tokens", type=positive, default=2_000_000, help="with --measured: train over at least so many"
    )
    parser.add_argument("--rows", type=Path, help="published rows, instead of the paper's own")
    parser.add_argument(
        "--models", type=Path, default=Path("examples/models"), help="folder of model configurations by name"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/reproduce"), help="folder for figures and page"
    )
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from ratrain.measured import NAMES as MEASURED
    from ratrain.plan.reproduce.rows import PAPER, load_rows
    from ratrain.plan.reproduce.setting import calibrated
    from ratrain.plan.reproduce.tables import reproduce
    from ratrain.report.reproduction import write_reproduction

    setting = calibrated(load_rows(args.rows or PAPER), args.models)
    only = set(args.only) if args.only else None
    simulated = only - set(MEASURED) if only and args.measured else only
    tables, curves = reproduce(setting, simulated), None
    if args.measured:
        measured, curves = _measured(args, only or set(MEASURED))
        tables = (*tables, *measured)
    page = write_reproduction(setting, tables, args.out, curves)
    if args.json:
        result = {"efficiency": setting.compute.efficiency, "tables": [table.to_json() for table in tables]}
        print(json.dumps(result))
        return 0
    print(f"efficiency of computing, calibrated on one row: {setting.compute.efficiency:.4f}")
    for table in tables:
        print(f"\n{text(table)}")
    print(f"\npage {page}")
    return 0


def _measured(args: argparse.Namespace, only: set[str]) -> tuple[list[Table], Curves | None]:
    from ratrain.measured import ABLATION, CORRECTNESS, ablation, correctness

    def tell(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    folder = args.out / "measured"
    tables: list[Table] = []
    curves = None
    if CORRECTNESS in only:
        losses, curves = correctness(folder / CORRECTNESS, args.tokens, tell)
        tables.append(losses)
    if ABLATION in only:
        tables.append(ablation(folder / ABLATION, tell))
    return tables, curves


def text(table: Table) -> str:
    """A table for people."""
    from ratrain.plan.reproduce.cells import HEADER
    from ratrain.report.table import render_table

    rows = [cell.words() for cell in table.cells]
    filled = [
        i for i in range(len(HEADER)) if any(row[i] for row in rows)
    ]  # columns without content are left out
    header = [HEADER[i] for i in filled]
    return "\n".join(
        [
            table.title,
            render_table(header, [[row[i] for i in filled] for row in rows]),
            *(f"  {words}" for words in table.words),
        ]
    )
