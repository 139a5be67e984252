"""A table as aligned text, for whatever the command line prints."""

from __future__ import annotations

from collections.abc import Sequence


def render_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns two spaces apart; a column is right-aligned when all its cells start with a digit or sign."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(header, *cells))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(cells) and all(c[:1].isdigit() or c[:1] in "+-–" for c in column[1:]) for column in columns]
    lines = []
    for row in [list(header), ["-" * width for width in widths], *cells]:
        parts = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right))
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)
