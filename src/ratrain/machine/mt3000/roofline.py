"""A roofline picture (Williams, Waterman and Patterson, CACM 2009): priced operators under the chip's roof."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ratrain.errors import UserError
from ratrain.machine.mt3000.chip import Chip
from ratrain.machine.mt3000.cost import Cost

COLOURS = {"compute": "tab:blue", "DDR": "tab:orange", "GSM": "tab:green", "issue": "tab:red"}


def intensity(cost: Cost) -> float:
    """FLOP per DDR byte that the schedule really moves."""
    return cost.schedule.flops / max(1, cost.ddr_bytes)


def ridge(chip: Chip, dtype: str) -> float:
    """FLOP per DDR byte above which a perfect schedule computes at peak."""
    return chip.peak(dtype) / chip.ddr_bytes_per_second


def draw_roofline(costs: dict[str, Cost], chip: Chip, dtype: str, path: Path) -> None:
    """Write a PNG of `costs` (label to price), replacing `path` only when complete."""
    from matplotlib.figure import Figure

    peak, rate = chip.peak(dtype) / 1e9, chip.ddr_bytes_per_second / 1e9
    xs = [intensity(cost) for cost in costs.values()]
    low, high = min(0.5, *xs) / 2, max(4 * ridge(chip, dtype), *xs) * 2
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.add_subplot()
    roof = ([low, ridge(chip, dtype), high], [low * rate, peak, peak])
    axes.loglog(*roof, color="0.25", lw=1.8)
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
    axes.text(3, 3 * rate * 1.5, f"DDR {rate:.0f} GB/s", color="0.25", size=9, ha="right")
    points = [
        (index, intensity(cost), cost.flops_per_second / 1e9, COLOURS[cost.bound])
        for index, cost in enumerate(costs.values(), 1)
    ]
    near = [point for point in points if 0.3 < point[1] / ridge(chip, dtype) < 8 and point[2] > peak / 5]
    far = points
    if len(near) > 3:
        # Too close to tell apart on a logarithmic scale: show them again, enlarged.
        inset = axes.inset_axes((0.5, 0.07, 0.47, 0.5))
        inset.plot(*roof, color="0.25", lw=1.5)
        inset.set_xlim(0.8 * min(p[1] for p in near), 1.15 * max(p[1] for p in near))
        inset.set_ylim(0.8 * min(p[2] for p in near), 1.1 * max(p[2] for p in near))
        inset.tick_params(labelsize=7)
        axes.indicate_inset_zoom(inset, edgecolor="0.6")
        _plot_points(inset, near)
        _plot_points(axes, near, numbered=False)
        far = [point for point in points if point not in near]
    _plot_points(axes, far)
    for (index, _, y, colour), (label, cost) in zip(points, costs.items()):
        axes.plot([], [], "o", color=colour, label=f"{index} {label}: {cost.bound}, {y:,.0f}")
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


def _plot_points(axes: Any, points: list[tuple[int, float, float, str]], numbered: bool = True) -> None:
    """Points from left to right, their numbers above and below in turn."""
    for turn, (index, x, y, colour) in enumerate(sorted(points, key=lambda point: point[1])):
        axes.plot(x, y, "o", color=colour, ms=6)
        if numbered:
            above = turn % 2 == 0
            offset = (0, 6 if above else -13)
            axes.annotate(str(index), (x, y), xytext=offset, textcoords="offset points", size=8, ha="center")
