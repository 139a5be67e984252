"""`ratrain data prepare`: a corpus as memory-mapped tokens, with its tokenizer."""

from __future__ import annotations

import argparse
import dataclasses
import json

from ratrain.commands.arguments import positive


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    commands = parser.add_subparsers(dest="what", metavar="prepare", required=True)
    prepare = commands.add_parser("prepare", help="tokenise a corpus into a folder that data.corpus accepts")
    prepare.add_argument("corpus", help="text file, folder, .jsonl, .jsonl.gz, or python-stdlib")
    prepare.add_argument("--validation", help="corpus for evaluation (default: about 2 %% of the documents)")
    prepare.add_argument("--tokenizer", help="HF tokenizer folder or tokenizer.json (default: train one)")
    prepare.add_argument("--vocab", type=positive, default=4096, help="vocabulary of a trained tokenizer")
    prepare.add_argument("--out", default=".cache/ratrain", help="cache folder")
    prepare.add_argument("--skip-bad", action="store_true", help="skip and count undecodable input")
    prepare.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from ratrain.commands.train import DataProgress
    from ratrain.data.prepare import prepare
    from ratrain.run_folder import SPLIT_SEED

    made = prepare(
        args.corpus,
        args.validation,
        args.tokenizer,
        args.vocab,
        args.out,
        SPLIT_SEED,
        DataProgress(),
        skip_bad=args.skip_bad,
    )
    facts = dataclasses.asdict(made.statistics)
    if args.json:
        print(json.dumps({"folder": str(made.train.parent), "reused": made.reused, **facts}))
        return 0
    print(f"prepared {made.train.parent}" + (" (already there)" if made.reused else ""))
    for name, value in facts.items():
        print(f"  {name.replace('_', ' ')}: {value}")
    return 0
