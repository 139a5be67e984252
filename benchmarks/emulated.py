"""How right the forecast is where this machine is too small: 8 and 16 emulated devices against the simulator.

    python benchmarks/emulated.py [--devices 8 16] [--steps 3] [--json FILE]

Every device is a process on a host of its own, behind a link shaped by a token bucket (needs root), 200 Mbit/s for 8.
16 devices are half as fast behind half the link: their hosts' own work, all on this machine's cores, is no part of
what is forecast, and so weighs as much beside theirs. Programs, messages and state units are a real run's; only
computing is replaced by waiting, for durations that are given (`device_of`). The links are measured first, in the
same window and between the same processes, and nothing else is: the forecast sees no step. One team of processes
runs all rows of a size. Beside the forecast stands the trivial model: computing with the 1F1B bubble, its one rate
fitted to all rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratrain.config import (
    AUTO,
    Config,
    DataConfig,
    MachineConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from ratrain.machine.emulated import EmulatedDevice
from ratrain.machine.profile import Profile
from ratrain.model.spec import ModelSpec
from ratrain.plan.plan import Plan
from windows import errors, summary, window, write_random_store

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
"""Messages have the sizes of this model: 262 kB of activations, 3.2 MB of gradients a layer."""
SEQ = 256
SEQUENCES = 2
"""Of a global batch, for each device."""

_DEVICE = EmulatedDevice(embed=(0.002, 0.002), layer=(0.016, 0.032), head=(0.012, 0.024), optimizer_rate=40e6)
"""Seconds of one sequence, forward and backward: long against what Python takes for an action."""
_LINK, _AT = 200, 8
"""Mbit/s of a link, and how many such devices this is for."""


def device_of(devices: int) -> EmulatedDevice:
    """One of so many devices."""
    return _DEVICE.slower(devices / _AT)


def link_of(devices: int) -> str:
    """The link of one of so many devices, as `tc` writes it."""
    return f"{_LINK * _AT // devices}mbit"


@dataclass(frozen=True)
class Case:
    """One row: a recipe, or a layout in full. `memory` is what the recipe must do with."""

    devices: int
    pipeline: int | None
    zero: int = 1
    policy: str = "keep"
    passes: str = "all"
    recipe: str = ""
    memory: str = "8 GB"

    @property
    def name(self) -> str:
        if self.recipe:
            return f"{self.recipe} on {self.devices}"
        assert self.pipeline is not None
        data = self.devices // self.pipeline
        return f"P{self.pipeline} D{data} Z{self.zero} {self.policy}, passes {self.passes}"


TIGHT = "150 MB"
"""At P=4 and D=4 nothing but recovery fits: keeping everything needs 189 MB."""
RECIPES = ("backward-checkpoint", "tuned", "baseline-1f1b", "paper", "ratrain")
CASES = (
    Case(8, 8),
    Case(8, 8, passes="none"),
    Case(8, 8, policy="inputs"),
    Case(8, 8, policy="inputs", passes="none"),
    Case(8, 4),
    Case(8, 4, zero=2),
    Case(8, 4, zero=0, passes="none"),
    Case(8, 2),
    Case(8, 1),
    Case(16, 4),
    Case(16, 4, passes="none"),
    Case(16, 8, policy="mlp"),
    Case(16, 2, passes="layerwise_sync"),
    *(Case(16, 4, recipe=name, memory=TIGHT) for name in RECIPES),
    Case(16, 4, recipe="full-save"),
    Case(16, 1, recipe="zero3-heavy"),
    Case(16, 1, recipe="tp-heavy"),
)


def configuration(case: Case, folder: Path) -> Config:
    """The run configuration of a row."""
    layout: dict[str, Any] = {"pipeline": case.pipeline, "tensor": AUTO}
    if case.recipe != "tp-heavy":
        layout |= {"tensor": 1, "data": case.devices // (case.pipeline or 1)}
    recovery = RecoveryConfig()
    if not case.recipe:
        assert case.pipeline is not None
        layout |= {"zero": case.zero, "layers": (16 // case.pipeline,) * case.pipeline}
        recovery = RecoveryConfig(policy=case.policy, ahead=1)
    return Config(
        model=ModelConfig(config=str(folder / "model.json")),
        data=DataConfig(corpus=str(folder / "store"), seq_len=SEQ),
        train=TrainConfig(steps=10**6, global_batch=SEQUENCES * case.devices, micro_batch=1),
        parallel=ParallelConfig(**layout),
        recovery=recovery,
        machine=MachineConfig(
            platform=str(folder / "profile.json"), devices=case.devices, memory=case.memory
        ),
        run=RunConfig(
            backend="emulated", passes="all" if case.recipe else case.passes, out=str(folder / "run")
        ),
    )


def plan_of(case: Case, folder: Path) -> Plan:
    """The plan of a row."""
    from ratrain.run_folder import resolve_plan

    spec = ModelSpec.from_dict(MODEL)
    return resolve_plan(
        configuration(case, folder), spec, None, case.devices, case.recipe or None, to_run=True
    )


def work(folder: Path, cases: Sequence[Case], steps: int) -> int:
    """A rank: measures the links with the others, then runs a window of every row; rank 0 writes what it saw."""
    from ratrain.runtime.worker import worker_main

    def body(rendezvous: Any, heartbeat: Any) -> int:
        import torch
        import torch.distributed as dist

        from ratrain.plan.forecasting import action_seconds
        from ratrain.runtime.mesh import build_mesh

        spec = ModelSpec.from_dict(MODEL)
        torch.set_num_threads(1)
        measure_device(folder, sorted({c.devices // (c.pipeline or 1) for c in cases} - {1} | {2, 4}))
        plans: list[Any] = [None]
        if rendezvous.rank == 0:
            plans = [[plan_of(case, folder).to_json() for case in cases]]
        dist.broadcast_object_list(plans)
        # One mesh a shape: process groups hold threads, and slow down what comes last.
        shapes = sorted({(p.pipeline, p.data, p.tensor) for p in map(Plan.from_json, plans[0])})
        meshes = {(p, d, t): build_mesh(p, d, rendezvous.rank, tied=False, tensor=t) for p, d, t in shapes}
        seen: dict[str, list[float]] = {}
        for case, written in zip(cases, plans[0]):
            plan = Plan.from_json(written)
            config, mesh = configuration(case, folder), meshes[plan.pipeline, plan.data, plan.tensor]
            durations = action_seconds(plan, spec, config)
            seen[case.name], timeline = window(config, spec, plan, mesh, folder, steps, durations)
            gc.collect()
            if timeline is not None:
                trace = folder / f"trace-{case.name.replace(' ', '_')}.json"
                trace.write_text(json.dumps(timeline.to_json()))
                print(f"{case.name}: {' '.join(f'{s:.3f}' for s in seen[case.name])} s", flush=True)
                told = {"seconds": seen, "plans": dict(zip(seen, plans[0]))}
                (folder / "measured.json").write_text(json.dumps(told))
        return 0

    return worker_main(body)


def measure_device(folder: Path, groups: Sequence[int]) -> None:
    """Measures the links and what the host itself does in a step; rank 0 writes the profile of an emulated device."""
    import torch.distributed as dist

    from ratrain.machine.measure import measure_optimizer, origin
    from ratrain.machine.measure_links import measure_links

    sizes = (4_096, 65_536, 262_144, 1_048_576, 4_194_304)
    links = measure_links(groups, sizes, rounds=3)
    if dist.get_rank() == 0:
        host = Profile(
            origin=origin(dist.get_world_size()),
            models={},
            blocks=(),
            optimizer_rate=1.0,
            norm_rate=measure_optimizer(rounds=3)[1],
            runtime_base_memory=0.0,
            communications=links,
            slowdown_under_communication=1.0,
            drag_under_compute=1.0,
        )
        device_of(dist.get_world_size()).profile(host, MODEL, SEQ).save(folder / "profile.json")
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", help="rows whose name has this in it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder to work in, kept")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()

    def rows_of(devices: int) -> list[Case]:
        return [case for case in CASES if case.devices == devices and (args.only or "") in case.name]

    if args.worker:
        sys.exit(work(args.worker, rows_of(args.devices[0]), args.steps))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for devices in args.devices:
            folder = (args.keep or Path(name)) / str(devices)
            prepare(folder)
            rest = ["--only", args.only] if args.only else []
            command = ["--worker", str(folder), "--devices", str(devices), "--steps", str(args.steps), *rest]
            start(devices, [sys.executable, str(Path(__file__).resolve()), *command])
            rows += judge(rows_of(devices), folder)
    report(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def prepare(folder: Path) -> None:
    """A token store of the size that the runs need, and the model's configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(MODEL))
    write_random_store(folder, ModelSpec.from_dict(MODEL).vocab)


def start(devices: int, command: list[str]) -> None:
    """A rank of `command` on each of as many hosts as there are devices."""
    from cluster import STEADY, Cluster

    shared = {
        "WORLD_SIZE": str(devices),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    with Cluster(hosts=devices, rate=link_of(devices), **STEADY) as cluster:
        ranks = [cluster.start(h, command, env={**shared, "RANK": str(h)}) for h in range(devices)]
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("a run failed")


def judge(cases: Sequence[Case], folder: Path) -> list[dict[str, Any]]:
    """Measured beside forecast, a row each."""
    from ratrain.plan.forecasting import forecast_step

    spec = ModelSpec.from_dict(MODEL)
    measured = json.loads((folder / "measured.json").read_text())
    rows = []
    for case in cases:
        plan = Plan.from_json(measured["plans"][case.name])
        step = forecast_step(plan, spec, configuration(case, folder)).simulation
        busy = max(plan.layers) * sum(device_of(case.devices).layer) / plan.tensor
        rows.append(
            {
                "row": case.name,
                "recipe": case.recipe,
                "devices": case.devices,
                "layout": f"P{plan.pipeline} D{plan.data}{f' T{plan.tensor}' * (plan.tensor > 1)} Z{plan.zero}",
                "layers": list(plan.layers),
                "measured": statistics.median(measured["seconds"][case.name]),
                "all": measured["seconds"][case.name],
                "forecast": step.step,
                "trivial": busy * (plan.micro_batches + plan.pipeline - 1),
                "peak_bytes": max(step.peak),
            }
        )
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    """The table, mean and worst errors, and whether the order of the recipes came out right."""
    from ratrain.report.table import render_table

    forecast, trivial = errors(rows)
    table = [
        (
            row["row"],
            row["layout"],
            f"{row['measured']:.3f}",
            f"{row['forecast']:.3f}",
            f"{mine:+.1%}",
            f"{plain:+.1%}",
            f"{row['peak_bytes'] / 1e6:.0f}",
        )
        for row, mine, plain in zip(rows, forecast, trivial)
    ]
    print(render_table(("row", "layout", "measured s", "forecast s", "error", "trivial", "peak MB"), table))
    print(summary(forecast, trivial))
    named = [row for row in rows if row["recipe"]]
    for key in ("measured", "forecast"):
        print(f"{key}: {' < '.join(row['recipe'] for row in sorted(named, key=lambda row: row[key]))}")


if __name__ == "__main__":
    main()
