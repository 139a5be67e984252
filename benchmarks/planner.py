"""The planner on MT-3000, held against the published rows of arXiv 2606.10415, and against its schedule.

    python benchmarks/planner.py [--json] [--model NAME --devices N --global-batch N [--pipeline P]]

One factor, the efficiency of computing, is calibrated on one row (LLaMA-2-7B on 256 clusters); every other row
is a prediction. The rows are in data/paper.toml. With --model, any model configuration and device count is
predicted under the same calibration, in place of the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratrain.config import Config, format_bytes, parse_config
from ratrain.errors import UserError
from ratrain.machine.platform import load_platform
from ratrain.model.spec import ModelSpec, load_spec
from ratrain.plan.command import short, tokens_per_second
from ratrain.plan.compute import Compute
from ratrain.plan.explain import impossible
from ratrain.plan.placement import even_layers
from ratrain.plan.plan import Plan
from ratrain.plan.request import read_request
from ratrain.plan.search import search
from ratrain.plan.simulated import with_time
from ratrain.report.table import render_table

ROOT = Path(__file__).resolve().parent.parent
ROWS = Path(__file__).parent / "data" / "paper.toml"

PAPERS_RECOVERY = "inputs"
BACKWARD_PASSES = ["layerwise_sync", "update_prefetch"]


@dataclass(frozen=True)
class Case:
    """What is asked of the planner; None leaves a choice open.

    schedule  own: placement and recovery are the planner's
              even: even placement, recovery as memory needs
              keep: even placement, nothing recovered
              paper: even placement, every layer recovered from its input ahead of the gradient
              backward: even placement, every layer and the head recovered right before their backwards
    """

    model: str
    devices: int
    global_batch: int
    seq_len: int
    schedule: str
    pipeline: int | None = None
    tensor: int | None = 1
    zero: int | None = None
    passes: str | None = None

    def spec(self) -> ModelSpec:
        """The model, of examples/models or of a path."""
        known = ROOT / "examples" / "models" / self.model
        return load_spec(known if known.exists() else Path(self.model))

    def config(self, spec: ModelSpec) -> Config:
        """As a run configuration."""
        parallel: dict[str, Any] = {"tensor": "auto" if self.tensor is None else self.tensor}
        parallel |= {
            name: v for name, v in (("pipeline", self.pipeline), ("zero", self.zero)) if v is not None
        }
        recovery: dict[str, Any] = {}
        passes: Any = self.passes or "all"
        if self.schedule != "own":
            assert self.pipeline is not None
            parallel["layers"] = list(even_layers(self.pipeline, spec.layers))
            parallel["data"] = self.devices // (self.pipeline * (self.tensor or 1))
        if self.schedule in ("paper", "keep"):
            recovery["policy"] = PAPERS_RECOVERY if self.schedule == "paper" else "keep"
        if self.schedule == "backward":
            recovery["policy"] = {"default": PAPERS_RECOVERY, "head": PAPERS_RECOVERY}
            passes = self.passes or BACKWARD_PASSES
        return parse_config(
            {
                "model": {"config": self.model},
                "data": {"corpus": "fixed token stream", "seq_len": self.seq_len},
                "train": {"global_batch": self.global_batch},
                "precision": {"view": "fp16"},
                "machine": {"platform": "mt3000", "devices": self.devices},
                "parallel": parallel,
                "recovery": recovery,
                "run": {"passes": passes},
            },
            "benchmark",
        )

    def best(self, compute: Compute) -> Plan:
        """The planner's answer; UserError if nothing fits."""
        spec = self.spec()
        request = read_request(self.config(spec), spec)
        result = search(request, compute, simulated=3)
        if not result.plans:
            raise UserError(impossible(request, compute, result))
        return result.plans[0]


def calibrate(row: dict[str, Any], sequence: int, compute: Compute) -> float:
    """The efficiency at which the simulated step of a row is the published one, by the secant method."""
    case = case_of(row, sequence)
    spec, plan = case.spec(), case.best(compute)

    def error(efficiency: float) -> float:
        return step_of(with_time(plan, spec, compute.at(efficiency))) - row["seconds"]

    left, right = 1.0, 0.95
    at_left, at_right = error(left), error(right)
    for _ in range(6):
        if abs(at_right) < 1e-4 * row["seconds"] or at_right == at_left:
            break
        left, right = right, right - at_right * (right - left) / (at_right - at_left)
        at_left, at_right = at_right, error(right)
    return right


def case_of(row: dict[str, Any], sequence: int) -> Case:
    """The case of a published row."""
    schedule = row.get("recovery") or ("even" if "zero" in row or "tensor" in row else "paper")
    return Case(
        row["model"], row["devices"], row["global_batch"], sequence, schedule, row["pipeline"],
        row.get("tensor", 1), row.get("zero"), row.get("passes"),
    )  # fmt: skip


def step_of(plan: Plan) -> float:
    """Seconds of the simulated step."""
    assert plan.forecast is not None and plan.forecast.step is not None
    return plan.forecast.step


def describe(plan: Plan) -> str:
    """The layout in a few words."""
    tensor = f" T={plan.tensor}" if plan.tensor > 1 else ""
    layers = "even" if len(set(plan.layers)) == 1 else short(plan.layers)
    return f"P={plan.pipeline} D={plan.data}{tensor} ZeRO-{plan.zero} b={plan.micro_batch}, {layers}"


def published_rows(rows: dict[str, Any], compute: Compute) -> list[dict[str, Any]]:
    """Every published step time against its prediction."""
    table = []
    calibrating = next(r for r in rows["step"] if r.get("calibrates"))
    rate = trivial_work(calibrating, rows["sequence"]) / calibrating["seconds"]
    for row in rows["step"]:
        plan = case_of(row, rows["sequence"]).best(compute)
        tokens = row["global_batch"] * rows["sequence"]
        seconds = row.get("seconds") or tokens / row["tokens_per_second"]
        table.append(
            {
                "row": row["name"],
                "published_s": seconds,
                "predicted_s": step_of(plan),
                "error": step_of(plan) / seconds - 1,
                "trivial_error": trivial_work(row, rows["sequence"]) / rate / seconds - 1,
                "calibrates": row.get("calibrates", False),
                "plan": describe(plan),
                "assumed": row["assumed"],
            }
        )
    return table


def trivial_work(row: dict[str, Any], sequence: int) -> float:
    """What a device computes in a step if every stage is alike and nothing but the 1F1B bubble is lost, in
    floating-point operations: the trivial model, calibrated on the same row."""
    spec = case_of(row, sequence).spec()
    sample = sum(spec.forward_flops(block, 1, sequence) for block in spec.block_names())
    passes = 4 if row.get("recovery") == "backward" else 3
    micro_batches = row["global_batch"] * row["pipeline"] * row.get("tensor", 1) / row["devices"]
    bubble = 1 + (row["pipeline"] - 1) / micro_batches
    return passes * sample * row["global_batch"] / row["devices"] * bubble


def peak_rows(rows: dict[str, Any], compute: Compute) -> list[dict[str, Any]]:
    """The feasibility rows: the planner's own placement at the published pipeline depth, in 20 GB."""
    table = []
    for row in rows["peak"]:
        batch = 32 * row["devices"]
        case = Case(
            row["model"], row["devices"], batch, rows["sequence"], "own", row["pipeline"], zero=row["zero"]
        )
        plan = case.best(compute)
        assert plan.forecast is not None
        table.append(
            {
                "row": row["name"],
                "published_bytes": row["bytes"],
                "predicted_bytes": plan.forecast.peak,
                "budget_bytes": plan.budget,
                "error": plan.forecast.peak / row["bytes"] - 1,
                "plan": describe(plan),
            }
        )
    return table


def beyond_rows(rows: dict[str, Any], compute: Compute) -> list[dict[str, Any]]:
    """Four models on 256 clusters, 2^23 tokens an update, under ever more freedom."""
    table = []
    for row in rows["beyond"]:
        common = (row["model"], 256, 4096, rows["sequence"])
        depth = row["pipeline"]
        cases = {
            "backward": [Case(*common, "backward", depth)],
            "paper": [Case(*common, "paper", depth), Case(*common, "keep", depth)],
            "own_same_p": [Case(*common, "own", depth)],
            "own_zero_2": [Case(*common, "own", zero=level) for level in (1, 2)],
            "own": [Case(*common, "own", tensor=None)],
        }
        plans = {name: _fastest(cases_, compute) for name, cases_ in cases.items()}
        table.append(
            {
                "model": row["model"],
                "assumed": row["assumed"],
                "seconds": {name: step_of(plan) if plan else None for name, plan in plans.items()},
                "plans": {name: describe(plan) if plan else None for name, plan in plans.items()},
            }
        )
    return table


def _fastest(cases: list[Case], compute: Compute) -> Plan | None:
    """The fastest of those that fit, if any does."""
    plans = []
    for case in cases:
        with contextlib.suppress(UserError):
            plans.append(case.best(compute))
    return min(plans, key=step_of, default=None)


def tables(result: dict[str, Any]) -> str:
    """The results as text."""
    parts = [f"efficiency of computing, calibrated on one row: {result['efficiency']:.4f}", ""]
    parts.append(
        render_table(
            ("row", "published s", "predicted s", "error", "trivial", "plan"),
            [
                (
                    r["row"],
                    f"{r['published_s']:.2f}",
                    f"{r['predicted_s']:.2f}",
                    "calibrated" if r["calibrates"] else f"{r['error']:+.1%}",
                    "calibrated" if r["calibrates"] else f"{r['trivial_error']:+.1%}",
                    r["plan"],
                )
                for r in result["steps"]
            ],
        )
    )
    parts += ["", "Assumed of the rows:"]
    parts += [f"  {r['row']}: {r['assumed']}" for r in result["steps"]]
    parts += [
        "",
        render_table(
            ("row", "published peak", "predicted peak", "error", "fits", "plan"),
            [
                (
                    r["row"],
                    format_bytes(r["published_bytes"]),
                    format_bytes(r["predicted_bytes"]),
                    f"{r['error']:+.1%}",
                    "yes" if r["predicted_bytes"] <= r["budget_bytes"] else "no",
                    r["plan"],
                )
                for r in result["peaks"]
            ],
        ),
        "",
        "Beyond the paper: 256 clusters, 2^23 tokens an update, seconds a step",
    ]
    names = {
        "backward": "backward-time recovery everywhere",
        "paper": "the paper's schedule (even; inputs, or all kept)",
        "own_same_p": "own plan, same P",
        "own_zero_2": "own plan, ZeRO-1 or 2, no tensor parallelism",
        "own": "own plan",
    }
    for r in result["beyond"]:
        base = r["seconds"]["paper"]
        lines = [
            (
                names[name],
                f"{r['seconds'][name]:.1f}" if r["seconds"][name] else "does not fit",
                f"{base / r['seconds'][name]:.2f}x" if base and r["seconds"][name] else "",
                r["plans"][name] or "",
            )
            for name in names
        ]
        parts += ["", render_table((r["model"], "step s", "speed-up", "plan"), lines)]
    return "\n".join(parts)


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--model", help="predict this model (a name of examples/models, or a path) instead")
    parser.add_argument("--devices", type=int, default=256, help="compute clusters, with --model")
    parser.add_argument("--global-batch", type=int, default=4096, help="sequences an update, with --model")
    parser.add_argument("--pipeline", type=int, help="stages, with --model; default: the planner's choice")
    parser.add_argument("--schedule", choices=("own", "paper", "backward", "even"), default="own")
    args = parser.parse_args()
    rows = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    plain = Compute(load_platform("mt3000"), "fp16")
    calibrating = next(r for r in rows["step"] if r.get("calibrates"))
    efficiency = calibrate(calibrating, rows["sequence"], plain)
    compute = plain.at(efficiency)
    if args.model:
        case = Case(
            args.model, args.devices, args.global_batch, rows["sequence"], args.schedule, args.pipeline
        )
        try:
            plan = case.best(compute)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        if args.json:
            print(json.dumps({"efficiency": efficiency, "plan": plan.to_json()}))
            return 0
        assert plan.forecast is not None
        print(f"{describe(plan)}: {step_of(plan):.2f} s, {tokens_per_second(plan):,.2f} tokens/s, ", end="")
        print(f"peak {format_bytes(plan.forecast.peak)}, efficiency {efficiency:.4f}")
        return 0
    result = {
        "efficiency": efficiency,
        "steps": published_rows(rows, compute),
        "peaks": peak_rows(rows, compute),
        "beyond": beyond_rows(rows, compute),
    }
    print(json.dumps(result) if args.json else tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
