"""`ratrain mt3000`: the chosen tiles, traffic, bound and predicted rate of a GEMM or of attention."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.errors import UserError

if TYPE_CHECKING:
    from ratrain.machine.mt3000.chip import Chip
    from ratrain.machine.mt3000.cost import Cost


def register(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    kinds = parser.add_subparsers(dest="kind", metavar="OPERATOR", required=True)
    gemm = kinds.add_parser("gemm", help="C[M,N] = A[M,K] B[K,N]", description=__doc__)
    for name in "MNK":
        gemm.add_argument(name, type=int, help=f"dimension {name}")
    gemm.add_argument(
        "--dtype", choices=("fp16", "fp32", "fp64"), default="fp16", help="of the inputs (fp16)"
    )
    gemm.add_argument(
        "--trans", choices=("nn", "nt", "tn"), default="nn", help="which input is transposed (nn)"
    )
    gemm.add_argument(
        "--split",
        choices=("auto", "n", "m", "k"),
        default="auto",
        help="over which dimension cores divide the work",
    )
    gemm.add_argument(
        "--tiles", metavar="MG=..,KG=..", default="", help="fix some of MG, KG, NA, MA, KA, MS, PM, PN, PK"
    )
    kernel = kinds.add_parser(
        "kernel", help="one micro-kernel call", description="Rate of one micro-kernel call."
    )
    for name in "MNK":
        kernel.add_argument(name, type=int, help=f"dimension {name}")
    kernel.add_argument(
        "--dtype", choices=("fp16", "fp32", "fp64"), default="fp16", help="of the inputs (fp16)"
    )
    kernel.add_argument("--trans", choices=("nn", "nt"), default="nn", help="nt: B stored [N,K] (nn)")
    attention = kinds.add_parser("attention", help="forward and backward of attention", description=__doc__)
    attention.add_argument("S", type=int, help="queries, and keys unless --keys says otherwise")
    attention.add_argument("--heads", type=int, default=32, help="query heads (32)")
    attention.add_argument("--kv-heads", type=int, help="key-value heads (as many as query heads)")
    attention.add_argument("--dim", type=int, default=128, help="elements of a head (128)")
    attention.add_argument("--batch", type=int, default=1, help="sequences (1)")
    attention.add_argument("--keys", type=int, help="keys")
    attention.add_argument("--full", action="store_true", help="not causal")
    for sub in (gemm, attention, kernel):
        sub.add_argument(
            "--platform", default="mt3000", metavar="CHIP", help="mt3000, ft_m7032 or a .toml file"
        )
        sub.add_argument("--json", action="store_true", help="print JSON")
    for sub in (gemm, attention):
        sub.add_argument("--cores", type=int, help="cores in use (all)")
        sub.add_argument("--schedule", action="store_true", help="print the schedule itself")
        sub.add_argument(
            "--roofline", type=Path, metavar="FILE.png", help="draw the operator under the chip's roof"
        )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from ratrain.machine.mt3000.chip import load_chip

    chip = load_chip(args.platform)
    if args.kind == "kernel":
        return _kernel(args, chip)
    costs = _gemm(args, chip) if args.kind == "gemm" else _attention(args, chip)
    dtype = getattr(args, "dtype", "fp16")
    if args.json:
        described = {label: describe(cost) for label, cost in costs.items()}
        print(json.dumps(described["gemm"] if args.kind == "gemm" else described, indent=1))
    else:
        for label, cost in costs.items():
            print("\n".join(_lines(label, cost, dtype)))
    if args.schedule:
        for cost in costs.values():
            print(cost.schedule)
    if args.roofline is not None:
        from ratrain.machine.mt3000.roofline import draw_roofline

        draw_roofline(costs, chip, dtype, args.roofline)
        if not args.json:
            print(f"roofline: {args.roofline}")
    return 0


def describe(cost: Cost) -> dict[str, Any]:
    """What the command says of one operator, for JSON. Bytes per path over the cluster; `ddr` is their DDR part."""
    from ratrain.machine.mt3000.roofline import intensity

    return {
        "percent_of_peak": round(cost.percent_of_peak, 3),
        "gflops": round(cost.flops_per_second / 1e9, 3),
        "seconds": cost.seconds,
        "bound": cost.bound,
        "tiles": cost.schedule.tiles,
        "bytes": {"ddr": cost.ddr_bytes, **cost.bytes},
        "cores": cost.schedule.cores,
        "flop_per_ddr_byte": round(intensity(cost), 3),
        "footprint": cost.schedule.footprint(cost.chip),
        "cycles": {
            "total": cost.cycles,
            "compute": cost.compute_cycles,
            "ddr": cost.ddr_cycles,
            "gsm": cost.gsm_cycles,
            "issue": cost.issue_cycles,
        },
    }


def _gemm(args: argparse.Namespace, chip: Chip) -> dict[str, Cost]:
    from ratrain.machine.mt3000.gemm import Problem
    from ratrain.machine.mt3000.gemm_search import best_gemm

    problem = Problem(args.M, args.N, args.K, args.dtype, args.trans)
    return {"gemm": best_gemm(chip, problem, args.cores, parse_tiles(args.tiles), args.split)}


def _attention(args: argparse.Namespace, chip: Chip) -> dict[str, Cost]:
    from ratrain.machine.mt3000.attention import Heads, best_attention

    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    if kv_heads < 1 or args.heads % kv_heads:
        raise UserError(
            f"{args.heads} heads, {kv_heads} key-value heads: the first must be a multiple of the second"
        )
    if args.batch < 1:
        raise UserError(f"batch is {args.batch}; it must be at least 1")
    keys = args.S if args.keys is None else args.keys
    heads = Heads(args.batch * kv_heads, args.heads // kv_heads, args.S, keys, args.dim, not args.full)
    return {
        name: best_attention(chip, heads, name == "backward", args.cores) for name in ("forward", "backward")
    }


def _kernel(args: argparse.Namespace, chip: Chip) -> int:
    from ratrain.machine.mt3000.kernels import gemm_cycles
    from ratrain.machine.mt3000.validation import micro_kernel_percent

    if min(args.M, args.N, args.K) < 1:
        raise UserError(f"micro-kernel {args.M} x {args.N} x {args.K}: every dimension must be at least 1")
    shape = (chip, args.dtype, args.M, args.N, args.K, args.trans == "nt")
    cycles, percent = gemm_cycles(*shape), micro_kernel_percent(*shape)
    if args.json:
        print(json.dumps({"cycles": cycles, "percent_of_peak": round(percent, 3)}))
    else:
        print(f"{cycles} cycles, {percent:.1f} % of one core's peak")
    return 0


def parse_tiles(text: str) -> tuple[tuple[str, int], ...]:
    """`MG=144,KG=512` as pairs; UserError if it is not that."""
    pairs = []
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if not value.strip().isdigit():
            raise UserError(f"--tiles: {part!r}; expected sizes such as MG=144,KG=512")
        pairs.append((key.strip().upper(), int(value)))
    return tuple(pairs)


def _lines(label: str, cost: Cost, dtype: str) -> list[str]:
    from ratrain.machine.mt3000.roofline import intensity, ridge

    schedule, chip = cost.schedule, cost.chip
    need = schedule.footprint(chip)
    share = {
        "compute": cost.compute_cycles,
        "DDR": cost.ddr_cycles,
        "GSM": cost.gsm_cycles,
        "issue": cost.issue_cycles,
    }
    return [
        f"{label}: {schedule.name} on {schedule.cores} of {chip.cores} cores, {chip.title}",
        f"  rate     {cost.flops_per_second / 1e9:,.1f} GFLOP/s, {cost.percent_of_peak:.1f} % of peak; "
        f"{cost.seconds * 1e3:.3f} ms; bound by {cost.bound}",
        "  tiles    " + " ".join(f"{key}={value}" for key, value in schedule.tiles.items()),
        f"  memory   GSM {need['gsm']:,} of {chip.gsm_bytes:,} B, AM {need['am']:,} of {chip.am_bytes:,} B, "
        f"SM {need['sm']:,} of {chip.sm_bytes:,} B",
        f"  traffic  DDR {cost.ddr_bytes:,} B: "
        + ", ".join(f"{path} {size:,}" for path, size in cost.bytes.items()),
        f"  roofline {intensity(cost):.1f} FLOP per DDR byte (ridge {ridge(chip, dtype):.0f})",
        "  busy     "
        + ", ".join(f"{name} {100 * cycles / cost.cycles:.0f} %" for name, cycles in share.items()),
    ]
