"""`ratrain profile`: measures this machine and its links for the planner."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.commands.arguments import positive

if TYPE_CHECKING:
    from ratrain.runtime.heartbeat import Heartbeat
    from ratrain.runtime.rendezvous import Rendezvous


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "--model", action="append", default=[], help="config.json or model folder (repeatable)"
    )
    parser.add_argument("--nproc", type=positive, default=2, help="processes on this host")
    parser.add_argument("--seq-len", type=positive, default=256, help="tokens per sequence")
    parser.add_argument("--micro-batch", type=positive, action="append", default=[], help="(repeatable)")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp64"))
    parser.add_argument("--out", type=Path, default=Path("profile.json"), help="profile to write")


def run(args: argparse.Namespace) -> int:
    """Runs the command: the parent starts ranks of the same command."""
    from ratrain.errors import UserError
    from ratrain.runtime.rendezvous import place_from

    if not args.model:
        raise UserError("profile: no --model given; name the config.json whose blocks are to be timed")
    if place_from(os.environ) is not None:
        return _measure(args)
    from ratrain.model.spec import load_spec
    from ratrain.runtime.launch import launch

    for model in args.model:
        load_spec(Path(model))
    options = [f"--model={Path(m).resolve()}" for m in args.model]
    options += [f"--micro-batch={b}" for b in args.micro_batch]
    options += [f"--seq-len={args.seq_len}", f"--dtype={args.dtype}", f"--out={args.out.resolve()}"]
    status = launch(["profile", *options], args.nproc)
    if status == 0:
        print(f"profile {args.out}: name it in machine.platform")
    return status


def _measure(args: argparse.Namespace) -> int:
    from ratrain.machine.measure import measure_machine
    from ratrain.model.spec import load_spec
    from ratrain.runtime.worker import worker_main

    def body(rendezvous: Rendezvous, heartbeat: Heartbeat) -> int:
        specs = {str(model): load_spec(Path(model)) for model in args.model}
        profile = measure_machine(specs, args.micro_batch or [1], args.seq_len, args.dtype)
        if rendezvous.rank == 0:
            profile.save(args.out)
        return 0

    return worker_main(body, debug=args.debug)
