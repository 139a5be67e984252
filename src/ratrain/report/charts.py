"""Small charts as SVG text. Colours are the CSS variables of `report.css`: they follow light and dark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_POINTS = 800
"""Points of a curve above which it is thinned: more than there are pixels to show."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart: (x, y) points, a CSS colour, and whether each point is dotted or the line faint."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Bar:
    """A horizontal bar: parts in order (name, length, CSS colour), and a note in the right margin.

    `second` makes it a thin companion of the bar above; `strong` a bold one.
    """

    label: str
    parts: Sequence[tuple[str, float, str]]
    note: str = ""
    second: bool = False
    strong: bool = False


def line_chart(
    curves: Sequence[Curve],
    references: Mapping[str, float] | None = None,
    width: int = 680,
    height: int = 240,
    show: Callable[[float], str] = "{:.4g}".format,
) -> str:
    """Curves over the step number, with dashed horizontal `references` by name."""
    references = references or {}
    finite = [(x, y) for c in curves for x, y in c.points if math.isfinite(y)]
    if not finite:
        return ""
    left, right, top, bottom = 58, 14, 12, 26
    x0, x1 = min(x for x, _ in finite), max(x for x, _ in finite)
    heights = [y for _, y in finite] + list(references.values())
    ticks = _ticks(min(heights), max(heights), 5)
    y0, y1 = min(ticks[0], *heights), max(ticks[-1], *heights)

    def px(x: float) -> float:
        return left + (x - x0) / ((x1 - x0) or 1) * (width - left - right)

    def py(y: float) -> float:
        return height - bottom - (y - y0) / ((y1 - y0) or 1) * (height - top - bottom)

    parts = []
    for y in ticks:
        parts.append(
            f'<line class="axis" x1="{left}" x2="{width - right}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
        )
        parts.append(f'<text x="{left - 8}" y="{py(y) + 4:.1f}" text-anchor="end">{show(y)}</text>')
    for x in _ticks(x0, x1, max(4, width // 100)):
        if x0 <= x <= x1 and x == int(x):
            parts.append(f'<text x="{px(x):.1f}" y="{height - 6}" text-anchor="middle">{x:.0f}</text>')
    for name, y in references.items():
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{py(y):.1f}" y2="{py(y):.1f}" stroke="var(--soft)" '
            f'stroke-dasharray="6 4"/><text x="{width - right}" y="{py(y) - 6:.1f}" text-anchor="end">'
            f"{escape(name)} {show(y)}</text>"
        )
    for curve in curves:
        points = [(px(x), py(y), x, y) for x, y in _thinned(curve.points) if math.isfinite(y)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _, _ in points)
        faint = ' opacity="0.35"' if curve.faint else ""
        parts.append(f'<polyline class="curve" points="{path}" style="stroke:{curve.colour}"{faint}/>')
        if curve.dots or len(points) == 1:
            parts += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" style="fill:{curve.colour}">'
                f"<title>step {x:.0f}: {escape(curve.name)} {show(y)}</title></circle>"
                for a, b, x, y in points
            ]
    return _svg(width, height, parts)


def bar_chart(
    bars: Sequence[Bar],
    show: Callable[[float], str],
    markers: Mapping[str, float] | None = None,
    width: int = 680,
) -> str:
    """Horizontal stacked bars; `markers` are vertical dashed lines by name."""
    markers = markers or {}
    left, right, top = 112, 190, 22
    longest = max([sum(n for _, n, _ in bar.parts) for bar in bars] + list(markers.values()), default=0.0)
    scale = (width - left - right) / (longest or 1.0)
    y = float(top)
    parts = []
    for bar in bars:
        thick = 6 if bar.second else 15
        y += 2 if bar.second else 8
        strong = ' class="strong" font-weight="600"' if bar.strong else ""
        base = y + thick / 2 + 4
        label = f'<text x="{left - 10}" y="{base:.1f}" text-anchor="end"{strong}>{escape(bar.label)}</text>'
        parts += [label, f'<text x="{width - right + 12}" y="{base:.1f}"{strong}>{escape(bar.note)}</text>']
        faint = ' opacity="0.6"' if bar.second else ""
        x = float(left)
        for name, length, colour in bar.parts:
            wide = length * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{thick}" style="fill:{colour}"'
                f"{faint}>"
                f"<title>{escape(bar.label)}: {escape(name)} {show(length)}</title></rect>"
            )
            x += wide
        y += thick
    for name, value in markers.items():
        x = left + value * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{y + 4:.1f}" stroke="var(--bad)" '
            f'stroke-width="1.5" stroke-dasharray="4 3"/>'
            f'<text x="{x:.1f}" y="11" text-anchor="middle">{escape(name)} {show(value)}</text>'
        )
    return _svg(width, y + 8, parts)


def smoothed(points: Sequence[tuple[float, float]], reach: int) -> list[tuple[float, float]]:
    """Each point's mean with the `reach` points on either side (fewer at the ends); gaps are left out."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    sums = [0.0, *itertools.accumulate(y for _, y in finite)]
    result = []
    for i, (x, _) in enumerate(finite):
        near = min(reach, i, len(finite) - 1 - i)
        result.append((x, (sums[i + near + 1] - sums[i - near]) / (2 * near + 1)))
    return result


def _svg(width: int, height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that cover [low, high]."""
    raw = (high - low) / about or abs(high) / about or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(n * power for n in (1, 2, 5, 10) if n * power >= raw * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [round(i * size, 12) for i in range(first, max(last, first + 1) + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    stride = max(1, len(points) // _POINTS)
    return [*points[::stride], *([points[-1]] if len(points) % stride else [])] if stride > 1 else points
