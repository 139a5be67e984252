"""`ratrain report`: a run's account as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="run folder")
    parser.add_argument("--json", action="store_true", help="print the account as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from ratrain.report.command import report_command

    report_command(args.folder, args.json)
    return 0
