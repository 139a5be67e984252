"""A program as a grid of characters: one row per stage, one column per unit of logical time."""

from __future__ import annotations

from ratrain.program.action import Action, Kind
from ratrain.program.program import Program

_LETTER = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.RECOVER: "R"}
_WIDTH = {Kind.FORWARD: 1, Kind.RECOVER: 1, Kind.BACKWARD: 2}


def cells(program: Program) -> list[list[tuple[int, int, str]]]:
    """Per stage (start, length, label) at micro-batch granularity.

    Logical durations: forward and recovery 1, backward 2, the usual ratio of their FLOPs; messages take none.
    Micro-batches that go block by block are drawn one after another.
    """
    layout = program.layout
    lists: list[list[tuple[Kind, int]]] = []
    for stage in range(layout.pipeline):
        merged: list[tuple[Kind, int]] = []
        seen: set[tuple[Kind, int]] = set()
        for action in program.lane(stage)["compute"]:
            if action.kind not in _LETTER or action.microbatch is None:
                continue
            entry = (action.kind, action.microbatch)
            if entry not in seen:
                seen.add(entry)
                merged.append(entry)
        lists.append(merged)
    return _place(lists)


def _place(lists: list[list[tuple[Kind, int]]]) -> list[list[tuple[int, int, str]]]:
    finished: dict[tuple[int, Kind, int], int] = {}
    clocks = [0] * len(lists)
    heads = [0] * len(lists)
    rows: list[list[tuple[int, int, str]]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for stage, entries in enumerate(lists):
            while heads[stage] < len(entries):
                kind, j = entries[heads[stage]]
                source = None
                if kind is Kind.FORWARD and stage > 0:
                    source = (stage - 1, Kind.FORWARD, j)
                elif kind is Kind.BACKWARD and stage < len(lists) - 1:
                    source = (stage + 1, Kind.BACKWARD, j)
                if source is not None and source not in finished:
                    break
                start = max(clocks[stage], finished.get(source, 0) if source else 0)
                clocks[stage] = finished[stage, kind, j] = start + _WIDTH[kind]
                rows[stage].append((start, _WIDTH[kind], f"{_LETTER[kind]}{j}"))
                heads[stage] += 1
                moved = True
    return rows


def render(program: Program, mark: Action | None = None, columns: int = 40) -> str:
    """The grid as text, cut after `columns` units of time; the cell of `mark` stands in brackets.

    Below the grid, what leaves the compute stream: per stage the first actions of the other streams.
    """
    marked = (mark.stage, f"{_LETTER.get(mark.kind, '?')}{mark.microbatch}") if mark else None
    lines = [f"{program.form} program, passes {', '.join(program.passes) or 'none'}"]
    for stage, row in enumerate(cells(program)):
        text = ["  . "] * min(columns, max((s + w for s, w, _ in row), default=0))
        for start, width, label in row:
            for t in range(start, min(start + width, len(text))):
                shown = label if t == start else "-"
                text[t] = f"[{shown}]".ljust(4) if marked == (stage, label) else f" {shown}".ljust(4)
        more = " ..." if row and row[-1][0] + row[-1][1] > columns else ""
        lines.append(f"stage {stage} |{''.join(text).rstrip()}{more}")
    for stage in range(program.layout.pipeline):
        for stream in ("sync", "prefetch"):
            actions = program.lane(stage).get(stream, ())
            if actions:
                shown = ", ".join(str(a) for a in actions[:4]) + (", ..." if len(actions) > 4 else "")
                lines.append(f"stage {stage} {stream}: {shown}")
    if mark is not None:
        lines.append(f"marked: {mark}")
    return "\n".join(lines)
