"""A roofline picture (Williams, Waterman and Patterson, CACM 2009): priced operators under the chip's roof."""

from __future__ import annotations

import os
from pathlib import Path

from ratrain.errors import UserError
from ratrain.machine.mt3000.chip import Chip
from ratrain.machine.mt3000.cost import Cost


def intensity(cost: Cost) -> float:
    """FLOP per DDR byte that the schedule really moves."""
    return cost.schedule.flops / max(1, cost.ddr_bytes)


def ridge(chip: Chip, dtype: str) -> float:
    """FLOP per DDR byte above which a perfect schedule computes at peak."""
    return chip.peak(dtype) / chip.ddr_bytes_per_second


def draw_roofline(costs: dict[str, Cost], chip: Chip, dtype: str, path: Path) -> None:
    """Write a PNG of `costs` (label to price), replacing `path` only when complete."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    peak, rate = chip.peak(dtype) / 1e9, chip.ddr_bytes_per_second / 1e9
    xs = [intensity(cost) for cost in costs.values()]
    low, high = min(0.5, *xs) / 2, max(4 * ridge(chip, dtype), *xs) * 2
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    axes.loglog([low, ridge(chip, dtype), high], [low * rate, peak, peak], color="0.25", lw=1.8)
    if chip.efficiency < 1:
        axes.axhline(peak * chip.efficiency, color="0.6", lw=1, ls="--")
        axes.text(
            low * 1.15,
            peak * chip.efficiency * 0.86,
            f"kernel {chip.efficiency:.1%}",
            color="0.4",
            va="top",
            size=9,
        )
    axes.text(low * 1.15, peak * 1.08, f"peak {peak / 1e3:.2f} TFLOP/s", color="0.25", size=9)
    axes.text(low * 1.4, low * 1.4 * rate * 1.35, f"DDR {rate:.0f} GB/s", color="0.25", size=9, rotation=38)
    colours = {"compute": "tab:blue", "DDR": "tab:orange", "GSM": "tab:green", "issue": "tab:red"}
    for index, (label, cost) in enumerate(costs.items(), 1):
        x, y = intensity(cost), cost.flops_per_second / 1e9
        axes.plot(x, y, "o", color=colours[cost.bound], ms=7)
        axes.annotate(str(index), (x, y), xytext=(5, -11), textcoords="offset points", size=8)
        axes.plot([], [], "o", color=colours[cost.bound], label=f"{index} {label}: {cost.bound}, {y:,.0f}")
    axes.set_xlim(low, high)
    axes.set_xlabel("FLOP per DDR byte moved")
    axes.set_ylabel("GFLOP/s per cluster")
    axes.set_title(f"{chip.title}, {dtype.upper()}")
    axes.grid(True, which="major", color="0.9")
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        fontsize=8,
        frameon=False,
        title="operator: bound, GFLOP/s",
    )
    aside = path.with_suffix(f".{os.getpid()}.png")
    try:
        figure.savefig(aside, dpi=130)
        aside.replace(path)
    except OSError as problem:
        aside.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot write the picture ({problem.strerror}); give a path in a folder you can write"
        ) from None
