"""The wall-clock part of `ratrain reproduce --measured`: small runs of the real command on this machine, as tables.

`correctness` trains one model three times: with the lifecycle passes, without, and as one plain process.
`ablation` runs emulated devices with each pass off, beside what the simulator says of the same runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ratrain.config import Config, load_config, to_toml
from ratrain.config import parse_config as parse
from ratrain.errors import UserError
from ratrain.machine.emulated import EmulatedDevice
from ratrain.machine.profile import load_profile
from ratrain.model.spec import load_spec
from ratrain.plan.forecasting import forecast_step
from ratrain.plan.plan import load_plan
from ratrain.plan.reproduce.cells import Cell, Table
from ratrain.plan.reproduce.curves import Curves
from ratrain.program.passes import PASSES
from ratrain.report.files import write_whole

CORRECTNESS, ABLATION = "correctness", "emulated"
NAMES = (CORRECTNESS, ABLATION)
"""Of the tables, for --only."""

TOKENS = 2_000_000
Tell = Callable[[str], None]

_FAMILY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
_SMALL = _FAMILY | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
"""Of the correctness runs: 0.2 M parameters, so that millions of tokens take minutes."""
_TRAINED: dict[str, Any] = {
    "data": {"corpus": "python-stdlib", "seq_len": 128},
    "train": {"global_batch": 64, "micro_batch": 8, "lr": 3e-3, "warmup_steps": 20},
    "parallel": {"pipeline": 2, "data": 2, "zero": 1},
    "recovery": {"policy": "inputs", "ahead": 1},
    "machine": {"memory": "2 GB"},
    "eval": {"batches": 1},
}
_WIDE = _FAMILY | {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
"""Of the emulated runs: real messages of 262 kB, and 3.2 MB of gradients a layer."""
_DEVICE = EmulatedDevice(embed=(0.001, 0.001), layer=(0.010, 0.020), head=(0.010, 0.020), optimizer_rate=40e6)
_EMULATED: dict[str, Any] = {
    "data": {"corpus": "python-stdlib", "seq_len": 256},
    "train": {"global_batch": 12, "micro_batch": 1, "steps": 14},
    "parallel": {"pipeline": 2, "data": 2, "zero": 1, "layers": [4, 4]},
    "recovery": {"policy": "inputs", "ahead": 1},
    "machine": {"memory": "4 GB", "devices": 4},
    "run": {"backend": "emulated"},
    "eval": {"batches": 1},
}
_SETTLE = 3
"""First steps of an emulated run that are not counted."""


def correctness(folder: Path, tokens: int, tell: Tell) -> tuple[Table, Curves]:
    """Trains over at least `tokens` tokens, three times. Run folders go below `folder`."""
    a_step = _TRAINED["train"]["global_batch"] * _TRAINED["data"]["seq_len"]
    steps = -(-tokens // a_step)
    settings = {**_TRAINED, "train": {**_TRAINED["train"], "steps": steps}}
    baseline, passes, plain = "baseline-1f1b", "all passes", "plain process"
    updates, seconds = {}, {}
    for name, chosen in ((baseline, "none"), (passes, "all")):
        begin = time.monotonic()
        run = _train(folder / name.replace(" ", "-"), _SMALL, settings, chosen, tell)
        updates[name], seconds[name] = run, time.monotonic() - begin
    begin = time.monotonic()
    updates[plain] = _plain(folder / baseline, steps, tell)
    seconds[plain] = time.monotonic() - begin
    curves = Curves({name: tuple(u["loss"] for u in run) for name, run in updates.items()})
    cells = []
    for name in (passes, plain):
        off = curves.deviation(name)
        where = f"{name} against {baseline}"
        cells.append(Cell(where, "loss deviation, mean", "%", sum(off) / len(off), None, "measured"))
        cells.append(
            Cell(
                where,
                "loss deviation, largest",
                "%",
                max(off),
                0.00081 if name == passes else None,
                "measured",
            )
        )
    same = all(a["grad_norm"] == b["grad_norm"] for a, b in zip(updates[baseline], updates[passes]))
    took = ", ".join(f"{name} {s:.0f} s" for name, s in seconds.items())
    words = (
        f"{steps} updates of {a_step:,} tokens, {steps * a_step:,} in all, of the Python standard library; P=2, D=2, "
        "ZeRO-1, fp32, layers dropped to their inputs, gradients clipped.",
        f"Losses from {curves.losses[baseline][0]:.3f} to {curves.losses[baseline][-1]:.3f}. Gradient norms of the two "
        f"runs {'are equal' if same else 'DIFFER'}. Took {took}.",
        "The plain process sums a global batch in one pass, and so in another order.",
    )
    return Table(CORRECTNESS, "The same losses, run here", tuple(cells), words), curves


def ablation(folder: Path, tell: Tell) -> Table:
    """Emulated devices behind this machine's loopback, each pass off in turn. Run folders go below `folder`."""
    profile = _measured_links(folder, tell)
    settings = {**_EMULATED, "machine": {**_EMULATED["machine"], "platform": str(profile)}}
    names = {"all passes": tuple(PASSES)}
    names |= {f"without {off}": tuple(p for p in PASSES if p != off) for off in PASSES}
    names["without any"] = ()
    times: dict[str, tuple[float, float]] = {}
    for name, passes in names.items():
        where = folder / name.replace(" ", "-")
        updates = _train(where, _WIDE, settings, ",".join(passes) or "none", tell)
        measured = median(u["step_time_s"] for u in updates[_SETTLE:-1])
        plan, config = load_plan(where / "plan.json"), load_config(where / "run.toml")
        simulated = forecast_step(plan, load_spec(where / "model.json"), config).simulation.step
        times[name] = measured, simulated
    cells = []
    first = times["all passes"]
    for name, (measured, simulated) in times.items():
        note = f"simulated {simulated:.3f} s ({simulated / measured - 1:+.1%})"
        if name == "all passes":
            cells.append(Cell(name, "step", "s", measured, None, "measured", note=note))
            continue
        ratio = simulated / first[1]
        note = f"simulated {ratio:.3f}x; {measured:.3f} s, {note.removeprefix('simulated ')} simulated"
        cells.append(Cell(name, "step", "x", measured / first[0], None, "measured", note=note))
    words = (
        "4 processes, P=2, D=2, ZeRO-1, layers dropped to their inputs; messages and state units are real, computing "
        "is waited for. Links were measured first; the forecast knows them and the durations.",
    )
    return Table(ABLATION, "Each lifecycle pass off, emulated devices", tuple(cells), words)


def _measured_links(folder: Path, tell: Tell) -> Path:
    """A profile of the emulated device behind this machine's links."""
    model, profile = _model(folder, _WIDE), folder / "profile.json"
    folder.mkdir(parents=True, exist_ok=True)
    tell("measuring the links between 4 processes")
    seq_len = _EMULATED["data"]["seq_len"]
    _run(["profile", "--model", str(model), "--nproc", "4", "--seq-len", str(seq_len), "--out", str(profile)])
    _DEVICE.profile(load_profile(profile), _WIDE, seq_len).save(profile)
    return profile


def _train(
    folder: Path, model: Mapping[str, Any], settings: Mapping[str, Any], passes: str, tell: Tell
) -> list[dict[str, Any]]:
    """`ratrain train` into `folder`, afresh; its updates."""
    config = _configuration(folder, model, settings)
    toml = folder.with_suffix(".toml")
    write_whole(toml, to_toml(config))
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    command = ["train", str(toml), "--passes", passes, "--resume", "never"]
    return _run(command, metrics, config.train.steps, lambda text: tell(f"{folder.name}: {text}"))


def _configuration(folder: Path, model: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    table = {
        **settings,
        "model": {"config": str(_model(folder, model))},
        "data": {**settings["data"], "cache": str(folder.parent.parent / "data")},
        "run": {**settings.get("run", {}), "out": str(folder), "threads": 1},
    }
    return parse(table, str(folder))


def _model(folder: Path, model: Mapping[str, Any]) -> Path:
    """config.json beside `folder`'s run file."""
    path = folder.with_name(f"{folder.name}-model") / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(model))
    return path


def _plain(folder: Path, steps: int, tell: Tell) -> list[dict[str, Any]]:
    """The plain process on the run in `folder`."""
    out = folder.with_name("plain.jsonl")
    command = [sys.executable, "-m", "ratrain.runtime.plain", str(folder)]
    with out.open("w") as lines:
        return _follow(
            subprocess.Popen(command, stdout=lines, stderr=subprocess.PIPE, text=True),
            out,
            steps,
            lambda text: tell(f"plain process: {text}"),
        )


def _run(
    arguments: Sequence[str], metrics: Path | None = None, steps: int = 0, tell: Tell = lambda text: None
) -> list[dict[str, Any]]:
    """A command of this program; its updates, if it writes `metrics`. UserError with its own line if it fails."""
    command = [sys.executable, "-m", "ratrain", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return _follow(process, metrics, steps, tell)


def _follow(
    process: subprocess.Popen[str], metrics: Path | None, steps: int, tell: Tell
) -> list[dict[str, Any]]:
    """Waits, and tells every tenth of the way."""
    told = 0
    while True:
        try:
            _, err = process.communicate(timeout=1.0)
            break
        except subprocess.TimeoutExpired:
            done = len(_updates(metrics)) if metrics is not None else 0
            if done * 10 // max(steps, 1) > told:
                told = done * 10 // steps
                tell(f"{done} of {steps} updates")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        cause = (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise UserError(f"a measured run failed: {cause.removeprefix('ratrain: ')}")
    found = _updates(metrics) if metrics is not None else []
    if len(found) != steps and metrics is not None:
        raise UserError(f"a measured run wrote {len(found)} of {steps} updates; see {metrics}")
    return found


def _updates(metrics: Path) -> list[dict[str, Any]]:
    """Whole lines that are updates."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().split("\n")[:-1]
    return [entry for entry in map(json.loads, lines) if "loss" in entry]
