"""Any model on any number of MT-3000 clusters, priced under the calibration of `ratrain reproduce`.

python benchmarks/planner.py --model llama-2-7b --devices 512 [--global-batch N] [--pipeline P] [--recipe NAME]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ratrain.config import format_bytes
from ratrain.errors import UserError
from ratrain.plan.command import short, tokens_per_second
from ratrain.plan.fit import fits, overflow
from ratrain.plan.recipes import NAMES, RATRAIN
from ratrain.plan.reproduce.rows import load_rows
from ratrain.plan.reproduce.setting import calibrated, describe

MODELS = Path(__file__).resolve().parent.parent / "examples" / "models"


def main() -> int:
    """Prints the plan of the recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a name of examples/models, or a path")
    parser.add_argument("--devices", type=int, default=256, help="compute clusters")
    parser.add_argument("--global-batch", type=int, default=4096, help="sequences an update")
    parser.add_argument("--pipeline", type=int, help="stages; default: the recipe's choice")
    parser.add_argument("--recipe", choices=NAMES, default=RATRAIN)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    try:
        setting = calibrated(load_rows(), MODELS)
        plan = setting.plan(args.recipe, args.model, args.devices, args.global_batch, pipeline=args.pipeline)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"efficiency": setting.compute.efficiency, "plan": plan.to_json()}))
        return 0
    if not fits(plan):
        print(f"out of memory: {overflow(plan)}")
        return 0
    assert plan.forecast is not None
    print(f"{describe(plan)}, layers {short(plan.layers)}: {plan.forecast.step:.2f} s, ", end="")
    print(f"{tokens_per_second(plan):,.2f} tokens/s, peak {format_bytes(plan.forecast.peak)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
