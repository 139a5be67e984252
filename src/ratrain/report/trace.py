"""`trace.json`: a timeline in Chrome's trace-event format, which Perfetto and chrome://tracing open.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
The raw Timeline travels in the same file under `ratrain`, so that nothing is lost to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ratrain.errors import UserError
from ratrain.program.program import STREAMS
from ratrain.program.timeline import Row, Timeline
from ratrain.report.files import read_object, write_whole
from ratrain.report.places import Place, places_of

_KEY = "ratrain"
_TRACKS = 16
"""Thread numbers set aside per stream: the stream's own, and more for rows that overlap on it."""


def write_trace(timeline: Timeline, path: Path, places: Sequence[Place] = ()) -> None:
    """Writes `timeline` to `path`, clocks aligned to rank 0's.

    One process per rank, one thread per stream in the order of STREAMS; slices are named `str(action)`.
    Where the compute stream waited there is a slice ``wait RECV_ACT(s1,m0)``. Receives that are posted
    ahead overlap: such rows go to further threads of the stream, because slices of one thread must nest.
    """
    known = places_of(timeline, places)
    document = {
        "displayTimeUnit": "ms",
        _KEY: {"timeline": timeline.to_json(), "ranks": [place.to_json() for place in known]},
        "traceEvents": list(_events(timeline, known)),
    }
    write_whole(path, json.dumps(document, separators=(",", ":")))


def read_trace(path: Path) -> Timeline:
    """The timeline that `write_trace` wrote; UserError for anything else."""
    try:
        return Timeline.from_json(_ours(path)["timeline"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a trace of this version of ratrain ({error}); run again") from error


def read_places(path: Path) -> tuple[Place, ...]:
    """The places of the ranks in a trace; UserError if it is not one of ours."""
    try:
        return tuple(Place.from_json(entry) for entry in _ours(path)["ranks"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a trace of this version of ratrain ({error}); run again") from error


def _ours(path: Path) -> dict[str, Any]:
    inner = read_object(path, "a trace.json that ratrain wrote").get(_KEY)
    if not isinstance(inner, dict):
        raise UserError(f"{path}: a trace, but not written by ratrain; expected the key {_KEY!r}")
    return inner


def _events(timeline: Timeline, places: Sequence[Place]) -> Iterator[dict[str, Any]]:
    lanes: dict[tuple[int, str], list[Row]] = {}
    for row in timeline.rows:
        lanes.setdefault((row.rank, row.stream), []).append(row)
    zero = min((r.start + timeline.offsets.get(r.rank, 0.0) for r in timeline.rows), default=0.0)
    names = [*STREAMS, *sorted({r.stream for r in timeline.rows} - set(STREAMS))]
    for place in places:
        yield _meta(place.rank, 0, "process_name", {"name": place.title})
        yield _meta(place.rank, 0, "process_sort_index", {"sort_index": place.rank})
        shift = timeline.offsets.get(place.rank, 0.0) - zero
        for number, stream in enumerate(names):
            rows = sorted(lanes.get((place.rank, stream), ()), key=lambda r: (r.start, r.end))
            for track, content in enumerate(_tracks(rows)):
                thread = number * _TRACKS + track
                title = stream + (f" +{track}" if track else "")
                yield _meta(place.rank, thread, "thread_name", {"name": title})
                yield _meta(place.rank, thread, "thread_sort_index", {"sort_index": thread})
                yield from _slices(content, shift, thread)


def _tracks(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows in order of start, spread over as few tracks as hold them without overlap."""
    tracks: list[list[Row]] = []
    for row in rows:
        free = next((t for t in tracks if t[-1].end <= row.start), None)
        if free is None:
            tracks.append([row])
        else:
            free.append(row)
    return tracks


def _slices(rows: Sequence[Row], shift: float, thread: int) -> Iterator[dict[str, Any]]:
    clock: float | None = None
    for row in rows:
        args: dict[str, Any] = {"step": row.step}
        if row.waited_for is not None:
            args["waited_for"] = str(row.waited_for)
            if clock is not None and row.start > clock:
                name = f"wait {row.waited_for}"
                yield _slice(
                    name, "wait", row.rank, thread, clock + shift, row.start + shift, {"step": row.step}
                )
        kind = row.action.kind.value
        yield _slice(str(row.action), kind, row.rank, thread, row.start + shift, row.end + shift, args)
        clock = row.end


def _slice(
    name: str, category: str, rank: int, thread: int, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    # Both ends are rounded, and not the duration, so that what follows another slice never begins within it.
    begins, ends = round(start * 1e6, 3), round(end * 1e6, 3)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "ts": begins,
        "dur": round(ends - begins, 3),
        "args": args,
    }


def _meta(rank: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args}
