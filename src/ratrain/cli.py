"""The command line: finds the command, prints errors in one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from ratrain import __version__
from ratrain.errors import UserError

COMMANDS = {
    "train": "train under a plan",
    "plan": "choose or validate a layout and say why",
    "simulate": "draw a step before it is run",
    "profile": "measure this machine for the planner",
    "check": "check a run's programs and print their grid",
    "data": "prepare a corpus",
    "export": "write a checkpoint as a Hugging Face model folder",
    "report": "account of a run as HTML",
    "reproduce": "the paper's tables beside ours, with figures",
    "mt3000": "tiles, traffic and rate of an operator on the MT-3000",
}
"""Command name to its line of help; the module `ratrain.commands.<name>` has `register` and `run`."""


class _Parser(argparse.ArgumentParser):
    """Refuses bad usage in one line, as everything else is refused."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ratrain: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 for a failed run, 2 for bad usage or bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="ratrain",
        description="Train dense language models where memory per device is small and the network is slow.",
    )
    parser.add_argument("--version", action="version", version=f"ratrain {__version__}")
    parser.add_argument("--debug", action="store_true", help="print tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in arguments if a in COMMANDS), None)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name == chosen:  # the others' modules are not even imported
            importlib.import_module(f"ratrain.commands.{name}").register(sub)
    args = parser.parse_args(arguments)
    try:
        status: int = importlib.import_module(f"ratrain.commands.{args.command}").run(args)
        return status
    except UserError as error:
        if args.debug:
            traceback.print_exc()
        print(f"ratrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ratrain: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(
            f"ratrain: internal error: {type(error).__name__}: {text} (--debug shows where)", file=sys.stderr
        )
        return 1
