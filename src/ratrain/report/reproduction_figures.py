"""Figures of `ratrain reproduce`, as PNG: ours beside the paper's, scaling, memory, and a step before and after."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ratrain.plan.reproduce.before_after import BeforeAfter
from ratrain.plan.reproduce.cells import Cell, Table
from ratrain.plan.reproduce.curves import Curves
from ratrain.plan.reproduce.scaling import REPORTED
from ratrain.plan.reproduce.tables import OF_PEAK
from ratrain.program.action import Kind
from ratrain.program.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OURS, _PAPERS, _BAD = "#2f6fd0", "#e0a91b", "#c8371b"


def speedups(table: Table) -> bytes | None:
    """Bars of the published rows: published over predicted step; whiskers are other degrees."""
    cells = [cell for cell in table.cells if cell.paper]
    if not cells:
        return None
    figure = _figure(10, 1.2 + 0.48 * len(cells))
    times, gains = ([c for c in cells if c.unit == unit] for unit in ("s", "x"))
    parts = [(part, name) for part, name in ((times, "step, s"), (gains, "speed-up of RATrain, x")) if part]
    axes = figure.subplots(len(parts), 1, squeeze=False, height_ratios=[len(part) for part, _ in parts])[:, 0]
    for each, (part, name) in zip(axes, parts):
        for y, cell in enumerate(part):
            each.barh(y - 0.19, cell.ours or 0.0, 0.36, color=_OURS, label="predicted" if y == 0 else None)
            each.barh(y + 0.19, cell.paper, 0.36, color=_PAPERS, label="published" if y == 0 else None)
            if cell.low is not None and cell.high is not None:
                span = each.plot([cell.low, cell.high], [y - 0.19] * 2, "|-", color="0.2", lw=1.2)
                span[0].set_label("predicted at other degrees")
        _rows(each, [cell.row for cell in part], name)
    keys = {name: key for key, name in zip(*axes[-1].get_legend_handles_labels())}
    figure.legend(keys.values(), keys.keys(), loc="outside upper center", ncols=3, frameon=False)
    return _png(figure)


def models(table: Table) -> bytes | None:
    """Throughput of every recipe on every model, over that of the paper's schedule."""
    names = list(dict.fromkeys(cell.row for cell in table.cells))
    recipes = list(dict.fromkeys(cell.quantity for cell in table.cells if cell.unit == "s"))
    found = {(c.row, c.quantity): c.ours for c in table.cells if c.unit == "s"}
    figure = _figure(3.4 * len(names), 4.2)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False, sharey=True)[0], names):
        base = found.get((name, "paper"))
        for y, recipe in enumerate(recipes):
            step = found.get((name, recipe))
            if base and step:
                colour = _OURS if recipe.startswith("ratrain") else _PAPERS if recipe == "paper" else "0.65"
                axes.barh(y, base / step, 0.7, color=colour)
                axes.text(base / step, y, f" {base / step:.2f}", va="center", size=8)
            else:
                axes.text(0.03, y, "out of memory", va="center", color=_BAD, size=8)
        _rows(axes, recipes, "throughput, the paper's schedule = 1")
        axes.set_title(name, size=10)
        axes.set_xlim(0, 1.7)
    return _png(figure)


def memory(table: Table, budget: int) -> bytes | None:
    """Peaks of every recipe on every model, against the budget of a device."""
    cells = [cell for cell in table.cells if cell.unit == "bytes"]
    names = list(dict.fromkeys(cell.row for cell in cells))
    recipes = list(dict.fromkeys(cell.quantity.removesuffix(OF_PEAK) for cell in cells))
    figure = _figure(3.4 * len(names), 4.2)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False, sharey=True)[0], names):
        for cell in cells:
            if cell.row == name and cell.ours is not None:
                y, size = recipes.index(cell.quantity.removesuffix(OF_PEAK)), cell.ours / 1e9
                axes.barh(y, size, 0.7, color=_BAD if cell.ours > budget else _OURS)
                # Inside its bar: beside it the line of the budget would cross many.
                axes.text(size, y, f"{size:.1f} ", va="center", ha="right", color="white", size=8)
        axes.axvline(budget / 1e9, color=_BAD, ls="--", lw=1)
        _rows(axes, recipes, f"peak, GB; budget {budget / 1e9:g}")
        axes.set_title(name, size=10)
    return _png(figure)


def scaling(table: Table) -> bytes | None:
    """Throughput per cluster over that of the fewest clusters, published and under every cause."""
    causes = list(dict.fromkeys(cell.quantity for cell in table.cells))
    figure = _figure(8, 4.4)
    axes = figure.subplots()
    published: Sequence[Cell] = [c for c in table.cells if c.quantity == causes[0]] if causes else []
    points = range(len(published))
    for cause in causes:
        cells = [cell for cell in table.cells if cell.quantity == cause]
        style: dict[str, Any] = (
            {"color": _OURS, "lw": 2.4} if cause == str(REPORTED) else {"lw": 1, "ls": "--"}
        )
        axes.plot(points, [100 * (c.ours or 0) for c in cells], marker=".", label=cause, **style)
    papers = [100 * (c.paper or 0) for c in published]
    axes.plot(points, papers, "o-", color=_PAPERS, lw=2.4, label="published")
    axes.set_xticks(list(points), [cell.row for cell in published], size=8)
    axes.set_ylabel("throughput per cluster, %")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return _png(figure)


def losses(curves: Curves) -> bytes:
    """Losses over updates, one line on another where runs are alike, and how far each is from the first."""
    figure = _figure(9, 5.4)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    styles: Sequence[dict[str, Any]] = (
        {"color": _PAPERS, "lw": 4},
        {"color": _OURS, "lw": 1.6},
        {"color": _BAD, "lw": 1, "ls": ":"},
    )
    first = next(iter(curves.losses))
    for (name, run), style in zip(curves.losses.items(), styles):
        updates = range(1, len(run) + 1)
        upper.plot(updates, run, label=name, **style)
        if name == first:
            continue
        off = curves.deviation(name)
        label = f"{name}: " + (f"mean {sum(off) / len(off):.2g}" if any(off) else "0 throughout")
        lower.plot(updates, off, label=label, **style)
    upper.set_ylabel("loss, nats a token")
    lower.set_ylabel(f"relative deviation\nfrom {first}")
    lower.set_xlabel("update")
    for axes in (upper, lower):
        axes.legend(frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return _png(figure)


def gantt(steps: BeforeAfter) -> bytes:
    """The compute streams of both timelines on one time axis, a row a stage."""
    colours = _kind_colours()
    stages = len({row.rank for t in steps.timelines.values() for row in t.rows})
    figure = _figure(13, 1.4 + 0.5 * stages)
    panels = figure.subplots(len(steps.timelines), 1, squeeze=False, sharex=True)[:, 0]
    used: dict[str, None] = {}
    for axes, (name, timeline) in zip(panels, steps.timelines.items()):
        used |= dict.fromkeys(_draw(axes, timeline, colours))
        axes.set_title(name, size=10, loc="left")
    panels[0].set_xlim(left=0)
    panels[-1].set_xlabel("seconds; collectives on the compute stream include waiting for the other ranks")
    from matplotlib.patches import Patch

    keys = [Patch(color=colours[kind], label=kind) for kind in colours if kind in used]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=8)
    figure.suptitle(steps.title, size=11)
    return _png(figure)


def _draw(axes: Any, timeline: Timeline, colours: dict[str, str]) -> set[str]:
    ranks = sorted({row.rank for row in timeline.rows})
    begin = min(row.start for row in timeline.rows if row.action.kind is Kind.FORWARD)
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for row in timeline.rows:
        if row.stream == "compute" and row.end > row.start:
            key = (ranks.index(row.rank), row.action.kind.value)
            bars.setdefault(key, []).append((row.start - begin, row.end - row.start))
    for (y, kind), spans in bars.items():
        axes.broken_barh(spans, (y - 0.4, 0.8), color=colours[kind], lw=0)
    _rows(axes, [f"stage {n}" for n in range(len(ranks))], "")
    return {kind for _, kind in bars}


def _kind_colours() -> dict[str, str]:
    """Those of the report's page: the first, light, set of its style sheet."""
    css = files("ratrain.report").joinpath("report.css").read_text(encoding="utf-8")
    light = dict(reversed(re.findall(r"--(\w+): (#\w+);", css)))
    return {kind.value: light[kind.value] for kind in Kind}


def _rows(axes: Any, names: Sequence[str], quantity: str) -> None:
    """Names down the left, the first on top."""
    axes.set_yticks(range(len(names)), names, size=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(quantity, size=9)
    axes.spines[["top", "right"]].set_visible(False)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # loaded only when something is drawn

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
