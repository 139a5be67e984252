"""The race at a glance: RATrain's step over each peer's, a group of bars a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from race.results import Result
from race.rows import RATRAIN, Row
from race.verdict import counts, ratio, reference_name

_COLOURS = ("#1f6fd6", "#9aa7b5")


def draw(raced: Sequence[tuple[Row, Result]], path: Path) -> None:
    """Writes a PNG; peers that cannot run a row, do not fit it, or shard otherwise than RATrain are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [(f"{row.name}: {name}", value) for row, result in raced for name, value in _ratios(row, result)]
    figure, axes = pyplot.subplots(figsize=(9, 0.24 * len(bars) + 1.2))
    places = range(len(bars), 0, -1)
    values = [value for _, value in bars]
    axes.barh(places, values, color=[_COLOURS[value >= 1.0] for value in values], height=0.7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    for place, value in zip(places, values):
        axes.text(value - 0.01, place, f"{value:.2f}", va="center", ha="right", color="white", fontsize=7)
    axes.set_yticks(list(places), [label for label, _ in bars], fontsize=7)
    axes.set_xlim(0, max(1.15, *values))
    axes.set_xlabel(
        "RATrain's seconds a step over the other tool's, medians of paired windows (left of 1: faster)"
    )
    axes.margins(y=0.01)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _ratios(row: Row, result: Result) -> list[tuple[str, float]]:
    mine = next(case for case in row.cases if case.name == reference_name(row, result))
    peers = [c for c in row.cases if c.tool != RATRAIN and c.zero == mine.zero and counts(row, result, c)]
    return [(c.name, ratio(result.records[mine.name], result.records[c.name])[0]) for c in peers]
