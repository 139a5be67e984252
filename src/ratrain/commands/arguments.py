"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """`--recipe NAME`."""
    # Not as choices: naming them here would load the planner for every --help.
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="lay out by name: tp-heavy, zero3-heavy, backward-checkpoint, full-save, tuned, baseline-1f1b, paper, "
        "ratrain",
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value
