"""How right the forecast is on this machine: real runs on two processes against the simulator.

    python benchmarks/forecast.py [--rounds 3] [--steps 4] [--links loopback 450mbit] [--json FILE]

Profiling and running alternate, because the machine drifts by 5 to 10 % in minutes: a run is held against the
profiles before and after it, and compared are medians over rounds. Blocks are profiled on two model shapes;
runs use these and a third that nobody profiled. Links other than loopback need root (network namespaces).
Beside the forecast stands the trivial model: one FLOP rate, fitted to all runs, and the 1F1B bubble.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratrain.config import (
    Config,
    DataConfig,
    MachineConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from ratrain.model.spec import ModelSpec
from windows import errors, summary, window, write_random_store

SEQ, VOCAB = 128, 4096
PROFILED = {"narrow": (256, 704, 4), "wide": (512, 1408, 8)}
PREDICTED = {"middle": (384, 1056, 6)}
"""Hidden, intermediate, heads. All have 8 layers."""
PROFILE_EVERY = 6
"""Cases between two profiles."""


@dataclass(frozen=True)
class Case:
    """One configuration of the benchmark."""

    model: str
    pipeline: int
    data: int
    zero: int = 1
    micro_batch: int = 1
    policy: str = "keep"
    layers: tuple[int, ...] = ()
    passes: str = "all"
    grouped: int = 1

    @property
    def name(self) -> str:
        place = "/".join(map(str, self.layers)) or "even"
        grouped = f", grouped {self.grouped}" if self.grouped > 1 else ""
        return (
            f"{self.model} P{self.pipeline} D{self.data} Z{self.zero} b{self.micro_batch} {self.policy} {place} "
            f"{self.passes}{grouped}"
        )


CASES = [
    *(
        Case(m, 2, 1, micro_batch=b, policy=p)
        for m in ("narrow", "wide", "middle")
        for b, p in ((1, "keep"), (2, "inputs"))
    ),
    *(Case(m, 1, 2, zero=z) for m in ("narrow", "wide", "middle") for z in (0, 1, 2)),
    *(Case("narrow", 1, 2, zero=3, micro_batch=b) for b in (1, 2)),
    *(Case(m, 2, 1, layers=(5, 3), policy=p) for m in ("wide", "middle") for p in ("elementwise", "mlp")),
    Case("wide", 2, 1, policy="inputs", passes="none"),
    Case("middle", 2, 1, layers=(3, 5)),
    Case("middle", 1, 2, zero=1, passes="none"),
    *(Case(m, 1, 2, zero=1, grouped=8) for m in ("wide", "middle")),
]


def model(name: str) -> dict[str, Any]:
    """config.json of one of the shapes."""
    hidden, intermediate, heads = (PROFILED | PREDICTED)[name]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 8,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": VOCAB,
        "max_position_embeddings": SEQ,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }


def configuration(case: Case, folder: Path, platform: str) -> Config:
    """The run configuration of a case."""
    return Config(
        model=ModelConfig(config=str(folder / f"{case.model}.json")),
        data=DataConfig(corpus=str(folder / "store"), seq_len=SEQ),
        train=TrainConfig(
            steps=10**6, global_batch=8 * case.data * case.micro_batch // 2 * 2, micro_batch=case.micro_batch
        ),
        parallel=ParallelConfig(
            pipeline=case.pipeline,
            data=case.data,
            tensor=1,
            zero=case.zero,
            layers=case.layers or (8 // case.pipeline,) * case.pipeline,
            grouped=case.grouped,
        ),
        recovery=RecoveryConfig(policy=case.policy, ahead=1),
        machine=MachineConfig(platform=platform, devices=2, memory="8 GB"),
        run=RunConfig(passes=case.passes, out=str(folder / "run")),
    )


def work(folder: Path, rounds: int, steps: int) -> int:
    """A rank: alternates between profiling and windows of every case; rank 0 writes what it saw."""
    from ratrain.runtime.worker import worker_main

    def body(rendezvous: Any, heartbeat: Any) -> int:
        import torch

        # A core a rank, as srun and mpirun bind them, and as ranks of a cluster have: a rank's transfers then
        # disturb itself and not the others.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rendezvous.rank % len(cores)]})
        torch.set_num_threads(1)
        from ratrain.machine.measure import measure_machine
        from ratrain.plan.resolve import resolve
        from ratrain.runtime.mesh import build_mesh

        seen: dict[str, list[float]] = {case.name: [] for case in CASES}

        def profile(number: int, place: int) -> None:
            measured = measure_machine(specs, [1, 2], SEQ, rounds=4)
            if rendezvous.rank == 0:
                measured.save(_profile(folder, number, place))

        # One mesh a shape: process groups hold threads, and a hundred of them slow down what comes last.
        meshes = {
            shape: build_mesh(*shape, rendezvous.rank, tied=False)
            for shape in sorted({(case.pipeline, case.data) for case in CASES})
        }
        specs = {name: ModelSpec.from_dict(model(name)) for name in PROFILED}
        for number in range(rounds):
            for place, case in enumerate(CASES):
                if place % PROFILE_EVERY == 0:
                    profile(number, place)
                config, spec = configuration(case, folder, "local"), ModelSpec.from_dict(model(case.model))
                mesh, plan = meshes[case.pipeline, case.data], resolve(config, spec, devices=2)
                seconds, _ = window(config, spec, plan, mesh, folder, steps - 1)
                if rendezvous.rank == 0:
                    seen[case.name].append(statistics.median(seconds))
                    print(f"round {number} {case.name}: {seen[case.name][-1]:.4f} s", flush=True)
            profile(number, len(CASES))
        if rendezvous.rank == 0:
            (folder / "measured.json").write_text(json.dumps(seen))
        return 0

    return worker_main(body)


def _profile(folder: Path, number: int, place: int) -> Path:
    """The profile measured in a round before the case at a place."""
    return folder / f"profile-{number}-{place}.json"


def predict(case: Case, folder: Path, profile: Path) -> tuple[float, float]:
    """Forecast step seconds of a case under one profile, and its trivial measure: FLOPs with the bubble."""
    from ratrain.plan.forecasting import forecast_step
    from ratrain.plan.resolve import resolve

    config = configuration(case, folder, str(profile))
    spec = ModelSpec.from_dict(model(case.model))
    plan = resolve(config, spec, devices=2)
    flops = sum(spec.forward_flops(block, case.micro_batch, SEQ) for block in spec.block_names())
    trivial = 3 * flops / plan.pipeline * (plan.micro_batches + plan.pipeline - 1)
    return forecast_step(plan, spec, config).simulation.step, trivial


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--links", nargs="*", default=["loopback"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sys.exit(work(args.worker, args.rounds, args.steps))
    rows = [row for link in args.links for row in measure(link, args.rounds, args.steps)]
    report(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def measure(link: str, rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Rows of all cases over one kind of link."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        command = ["--worker", str(folder), "--rounds", str(rounds), "--steps", str(steps)]
        start(link, [sys.executable, str(Path(__file__).resolve()), *command])
        seen = json.loads((folder / "measured.json").read_text())
        for place, case in enumerate(CASES):
            before = place // PROFILE_EVERY * PROFILE_EVERY
            around = (before, min(before + PROFILE_EVERY, len(CASES)))
            forecasts = [
                predict(case, folder, _profile(folder, number, at))
                for number in range(rounds)
                for at in around
            ]
            yield {
                "link": link,
                "case": case.name,
                "measured": statistics.median(seen[case.name]),
                "forecast": statistics.median(
                    statistics.mean(f for f, _ in pair) for pair in zip(forecasts[::2], forecasts[1::2])
                ),
                "trivial": forecasts[0][1],
                "sequences": configuration(case, folder, "local").train.global_batch,
                "model": case.model,
            }


def prepare(folder: Path) -> None:
    """A token store of the size that the runs need, and the models' configurations."""
    for name in PROFILED | PREDICTED:
        (folder / f"{name}.json").write_text(json.dumps(model(name)))
    write_random_store(folder, VOCAB)


def start(link: str, command: list[str]) -> None:
    """Two ranks of `command`, on one host or on two hosts joined by `link`."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if link == "loopback":
        from ratrain.runtime.launch import launch

        if launch(command[1:], 2, env=environment, program=command[:1]):
            raise SystemExit("a run failed")
        return
    from cluster import STEADY, Cluster

    with Cluster(hosts=2, rate=link, pin=True, **STEADY) as cluster:
        shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        ranks = [cluster.start(h, command, env={**shared, "RANK": str(h)}) for h in range(2)]
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("a run failed")


def report(rows: list[dict[str, Any]]) -> None:
    """The table, and mean and worst errors."""
    from ratrain.report.table import render_table

    forecast, trivial = errors(rows)
    table = [
        (
            row["link"],
            row["case"],
            f"{row['measured']:.4f}",
            f"{row['forecast']:.4f}",
            f"{mine:+.1%}",
            f"{plain:+.1%}",
        )
        for row, mine, plain in zip(rows, forecast, trivial)
    ]
    print(render_table(("link", "case", "measured s", "forecast s", "error", "trivial"), table))
    print(choices(rows))
    print(summary(forecast, trivial))


def choices(rows: list[dict[str, Any]]) -> str:
    """What taking the configuration with the best forecast costs against the best that was run, a model and link."""
    found = []
    for link, name in sorted({(row["link"], row["model"]) for row in rows}):
        mine = [row for row in rows if (row["link"], row["model"]) == (link, name)]
        chosen = min(mine, key=lambda row: row["forecast"] / row["sequences"])
        best = min(mine, key=lambda row: row["measured"] / row["sequences"])
        lost = chosen["measured"] / chosen["sequences"] / (best["measured"] / best["sequences"]) - 1
        found.append(
            f"{link}, {name}: the forecast chooses {chosen['case']}, {lost:.1%} slower than the best"
        )
    return "\n".join(found)


if __name__ == "__main__":
    main()
