"""trace.json: what Perfetto is given, and that nothing is lost on the way."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ratrain.errors import UserError
from ratrain.program.action import Action, Kind, parse
from ratrain.program.layout import Layout
from ratrain.program.program import STREAMS
from ratrain.program.timeline import Row, Timeline
from ratrain.report.places import Place, places_of
from ratrain.report.trace import read_places, read_trace, write_trace
from report_samples import mesh, run_program

LAYOUT = Layout.even(2, 2, replicas=2, microbatches=4)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    timeline = run_program(LAYOUT, noise=0.05)
    timeline.offsets[3] = 12.5
    return timeline


def events(path: Path, phase: str) -> list[dict]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == phase]


def test_reads_back_what_was_written(timeline: Timeline, tmp_path: Path) -> None:
    write_trace(timeline, tmp_path / "trace.json", mesh(LAYOUT))
    assert read_trace(tmp_path / "trace.json") == timeline
    assert read_places(tmp_path / "trace.json") == mesh(LAYOUT)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_processes_are_ranks_and_threads_streams_in_order(timeline: Timeline, tmp_path: Path) -> None:
    write_trace(timeline, tmp_path / "trace.json", mesh(LAYOUT))
    meta = events(tmp_path / "trace.json", "M")
    names = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    assert names[2] == "rank 2 (stage 1, replica 0)"
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    for rank in range(4):
        order = [name.split(" +")[0] for (pid, _), name in sorted(threads.items()) if pid == rank]
        assert order == sorted(order, key=STREAMS.index)


def test_slices_are_actions_and_waits(timeline: Timeline, tmp_path: Path) -> None:
    write_trace(timeline, tmp_path / "trace.json", mesh(LAYOUT))
    slices = events(tmp_path / "trace.json", "X")
    work = [e for e in slices if e["cat"] != "wait"]
    assert sorted(e["name"] for e in work) == sorted(str(r.action) for r in timeline.rows)
    waits = [e for e in slices if e["cat"] == "wait"]
    assert waits and all(parse(e["name"].removeprefix("wait ")) for e in waits)
    assert {e["cat"] for e in slices} <= {"wait", *(k.value for k in Kind)}
    assert min(e["ts"] for e in slices) == 0


def test_wait_fills_the_gap_on_the_aligned_clock(tmp_path: Path) -> None:
    recv, forward = Action(Kind.RECV_ACT, 1, None, 1), Action(Kind.FORWARD, 1, "head", 1)
    rows = [
        Row(0, 0, "compute", Action(Kind.FORWARD, 0, "embed", 0), 100.0, 100.5),
        Row(1, 0, "compute", Action(Kind.FORWARD, 1, "head", 0), 7.0, 7.5),
        Row(1, 0, "compute", forward, 7.75, 8.0, recv),
    ]
    write_trace(Timeline(rows, {0: 0.0, 1: 93.5}), tmp_path / "t.json")
    found = {e["name"]: (e["ts"], e["dur"]) for e in events(tmp_path / "t.json", "X")}
    assert found["wait RECV_ACT(s1,m1)"] == (1e6, 0.25e6)
    assert found[str(forward)] == (1.25e6, 0.25e6)


def test_slices_of_one_thread_do_not_overlap(tmp_path: Path) -> None:
    posted = [
        Row(0, 0, "recv_grad", Action(Kind.RECV_GRAD, 0, None, j), j * 1.0, j * 1.0 + 2.5) for j in range(5)
    ]
    write_trace(Timeline(posted), tmp_path / "t.json")
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for e in events(tmp_path / "t.json", "X"):
        by_thread.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(by_thread) == 3
    for spans in by_thread.values():
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_places_are_guessed_from_the_actions(timeline: Timeline) -> None:
    assert places_of(timeline) == mesh(LAYOUT)
    assert places_of(timeline, [Place(0, 0, 9)])[0] == Place(0, 0, 9)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"ratrain": {}}', '{"ratrain": {"timeline": {"version": 9}}}']
)
def test_foreign_files_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"trace\.json") as error:
        read_trace(path)
    assert "\n" not in str(error.value)
