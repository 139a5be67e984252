"""`ratrain train`: checks everything, starts one process per device, or works as one of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.commands.arguments import add_recipe, positive
from ratrain.config import Config, describe, load_config, parse_config, to_toml
from ratrain.errors import UserError
from ratrain.report.table import render_table
from ratrain.run_folder import CHECKPOINTS, Run, model_folder, prepare_run, read_run

if TYPE_CHECKING:
    from ratrain.runtime.heartbeat import Heartbeat
    from ratrain.runtime.mesh import Mesh
    from ratrain.runtime.rendezvous import Rendezvous
    from ratrain.runtime.trainer import Recorder

_SAID_WITHIN = 30.0
"""Seconds that ranks of one host may start apart; waited in full only under launchers that end no rank."""


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run", nargs="?", metavar="RUN.toml", help="run configuration")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override a configuration value"
    )
    parser.add_argument("--out", help="run folder (run.out)")
    parser.add_argument("--nproc", type=positive, help="processes on this host (default: what the plan has)")
    parser.add_argument("--port", type=int, help="rendezvous port (default: a free one)")
    parser.add_argument("--plan", type=Path, help="run exactly this plan")
    add_recipe(parser)
    parser.add_argument(
        "--resume", default="auto", metavar="auto|never|PATH", help="checkpoint to go on from"
    )
    parser.add_argument("--passes", metavar="all|none|NAMES", help="lifecycle passes (run.passes)")
    parser.add_argument("--help-config", action="store_true", help="list every configuration field and stop")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.help_config:
        print(render_table(("field", "default", "meaning"), describe()))
        return 0
    from ratrain.runtime.launch import launch
    from ratrain.runtime.rendezvous import listen, place_from

    place = place_from(os.environ)
    if args.worker is not None or place is not None:
        try:
            return _work(args)
        except UserError:
            if place is not None and place.local_rank > 0:
                # The first rank of this host says the same. A launcher ends all ranks when one ends: it may come
                # later than this one, and must not be ended before it has said it.
                time.sleep(_SAID_WITHIN)
                return 2
            raise

    if args.port is not None:  # a taken one is known before the data is prepared
        listen("127.0.0.1", args.port).close()
    prepared = prepare_run(
        configuration(args), args.plan, args.nproc, args.resume, DataProgress(), args.recipe
    )
    print(announce(prepared))
    sys.stdout.flush()
    if _finished(prepared):
        return 0
    debug = ["--debug"] if args.debug else []
    return launch(
        ["train", "--worker", str(prepared.folder), *debug], prepared.plan.ranks, master_port=args.port
    )


def configuration(args: argparse.Namespace) -> Config:
    """The configuration that the arguments name, options applied."""
    if args.run is None:
        raise UserError("train: no RUN.toml given; see examples/tiny.toml")
    options = {"run.out": args.out, "run.passes": args.passes}
    given = [f"{name}={json.dumps(value)}" for name, value in options.items() if value is not None]
    if args.passes is not None and args.plan is not None:
        raise UserError("--passes and --plan: a plan says which passes run; give one of the two")
    if args.passes is not None and args.recipe is not None:
        raise UserError("--passes and --recipe: a recipe says which passes run; give one of the two")
    return load_config(Path(args.run), [*args.set, *given])


def announce(run: Run) -> str:
    """What is about to run, for people."""
    plan, data = run.plan, run.statistics
    tensor = f" T={plan.tensor}" if plan.tensor > 1 else ""
    lines = [
        f"model {plan.model}, {run.spec.parameter_count():,} parameters",
        f"plan P={plan.pipeline} D={plan.data}{tensor} ZeRO-{plan.zero}, layers {'/'.join(map(str, plan.layers))}, "
        f"micro-batch {plan.micro_batch} x {plan.micro_batches}, passes {', '.join(plan.passes) or 'none'}",
        f"data {data['train_tokens']:,} training tokens, unigram entropy {data['unigram_entropy']:.4f} nats",
    ]
    if any(data["skips"].values()):
        skipped = ", ".join(f"{n} {why}" for why, n in data["skips"].items())
        lines.append(f"skipped documents: {skipped}")
    lines.append(f"run folder {run.folder}")
    if run.resume is not None:
        lines.append(f"resuming from {run.resume}")
    if _finished(run):
        lines.append(
            f"step {_start(run)} of {run.config.train.steps} is reached: nothing to train; raise train.steps, or "
            "start afresh with --resume never"
        )
    return "\n".join(lines)


def _start(run: Run) -> int:
    """Updates that the run has behind it."""
    from ratrain.runtime.manifest import read_manifest

    return read_manifest(run.resume).step if run.resume is not None else 0


def _finished(run: Run) -> bool:
    """Whether nothing is left to train."""
    return _start(run) >= run.config.train.steps


class DataProgress:
    """Shows how far data preparation is, on one line of standard error, or nothing if that is no terminal."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            share = done / total if total else 1.0
            end = "\n" if done >= total else ""
            print(f"\r{stage}: {share:4.0%}", end=end, file=sys.stderr, flush=True)


def _work(args: argparse.Namespace) -> int:
    from ratrain.runtime.worker import worker_main

    config = configuration(args) if args.worker is None else read_run(args.worker).config

    def body(rendezvous: Rendezvous, heartbeat: Heartbeat) -> int:
        assigned = read_run(args.worker) if args.worker is not None else _meet(args, rendezvous)
        return 0 if _finished(assigned) else _train(assigned, rendezvous)

    return worker_main(body, device=config.run.device, debug=args.debug)


def _meet(args: argparse.Namespace, rendezvous: Rendezvous) -> Run:
    """Under another launcher: rank 0 prepares and tells the others; each host makes sure of its data."""
    config = configuration(args)
    if rendezvous.rank == 0:
        prepared = prepare_run(config, args.plan, rendezvous.world_size, args.resume, recipe=args.recipe)
        print(announce(prepared), flush=True)
        told = {
            "config": to_toml(prepared.config),
            "plan": prepared.plan.to_json(),
            "train": str(prepared.train),
            "validation": str(prepared.validation or ""),
            "resume": str(prepared.resume or ""),
            "statistics": prepared.statistics,
            "identity": prepared.identity,
            "durations": prepared.durations,
        }
        rendezvous.store.set("run", json.dumps(told))
        return prepared
    import tomllib

    from ratrain.model.spec import load_spec
    from ratrain.plan.plan import Plan

    # Preparing takes as long as the corpus is large; should rank 0 die over it, the heartbeat ends this rank.
    rendezvous.store.wait(["run"], timedelta(days=30))
    told = json.loads(rendezvous.store.get("run"))
    config = parse_config(tomllib.loads(told["config"]), args.run)
    paths = {key: Path(told[key]) if told[key] else None for key in ("train", "validation", "resume")}
    assert paths["train"] is not None
    if not paths["train"].exists():
        raise UserError(
            f"{paths['train']}: rank 0 prepared the data there, but this host does not see it; set data.cache "
            "to a directory that all hosts share"
        )
    return Run(
        Path(config.run.out),
        config,
        load_spec(Path(config.model.config)),
        Plan.from_json(told["plan"]),
        paths["train"],
        paths["validation"],
        paths["resume"],
        told["statistics"],
        told["identity"],
        told["durations"],
    )


def _train(assigned: Run, rendezvous: Rendezvous) -> int:
    from ratrain.runtime.work import Assignment, work

    plan = assigned.plan
    assignment = Assignment(
        config=assigned.config,
        spec=assigned.spec,
        layout=plan.layout(),
        passes=plan.passes,
        micro_batch=plan.micro_batch,
        slice_tokens=plan.slice_tokens,
        formats=(plan.view, plan.grad, plan.reduce),
        weights=model_folder(assigned.config),
        train=assigned.train,
        validation=assigned.validation,
        resume=assigned.resume,
        folder=assigned.folder,
        checkpoints=assigned.folder / CHECKPOINTS,
        identity=assigned.identity,
        durations=assigned.durations,
    )
    holder: list[Any] = []

    def recorder(mesh: Mesh) -> Recorder | None:
        if mesh.rank == 0:
            holder.append(_recorder(assigned, mesh))
        return holder[0] if holder else None

    try:
        finished = work(assignment, rendezvous, recorder)
    finally:
        for made in holder:
            made.close()
    if holder:
        from ratrain.report.html import write_report

        if not finished:
            print("stopped as asked: saved, and ready to go on with --resume auto", flush=True)
        print(f"report {write_report(assigned.folder)}", flush=True)
    return 0


def _recorder(assigned: Run, mesh: Mesh) -> Recorder:
    from ratrain.report.places import Place
    from ratrain.report.recorder import RunRecorder
    from ratrain.report.terminal import Progress

    plan, config = assigned.plan, assigned.config
    places = [
        Place(
            rank, *divmod(rank // mesh.tensor, mesh.replicas), rank % mesh.tensor if mesh.tensor > 1 else None
        )
        for rank in range(mesh.size)
    ]
    forecast = plan.forecast.memory if plan.forecast else ()
    header: Mapping[str, Any] = {
        "world_size": mesh.size,
        "budget_bytes": plan.budget,
        "forecast_peak_bytes": [forecast[p.stage].total for p in places] if forecast else [],
        "unigram_entropy": assigned.statistics["unigram_entropy"],
        "ranks": [p.to_json() for p in places],
        "passes": list(plan.passes),
    }
    done = _start(assigned)
    progress = Progress(plan.budget)
    progress.start(config.train.steps, done)
    return RunRecorder(assigned.folder, progress, header, places, done)
