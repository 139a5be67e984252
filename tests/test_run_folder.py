"""What a run leaves behind, and what it says while it runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from math import isfinite
from pathlib import Path

import pytest

from ratrain.cli import main
from ratrain.config import load_config
from ratrain.plan.plan import load_plan
from ratrain.program.program import STREAMS
from ratrain.report.trace import read_trace
from run_samples import Trained, column, metrics

PROMISED = {
    "run.toml",
    "plan.json",
    "metrics.jsonl",
    "tensorboard",
    "trace.json",
    "report.html",
    "checkpoints",
}


def test_it_holds_what_is_promised_and_nothing_half_written(trained: Trained) -> None:
    names = {p.name for p in trained.run.iterdir()}
    assert names >= PROMISED
    assert names - PROMISED == {"model.json", "setup.json", "forecast.json", "tokenizer"}
    assert not [p for p in trained.run.rglob("*") if "partial" in p.name or p.name.startswith(".shared")]


def test_the_resolved_run_file_reads_back_equal_and_runs(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_config(trained.run / "run.toml") == load_config(trained.toml)
    assert main(["plan", str(trained.run / "run.toml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["plan"]
    plan = json.loads((trained.run / "plan.json").read_text())
    assert {k: told[k] for k in ("layers", "data", "zero", "passes")} == {
        "layers": plan["layers"], "data": 2, "zero": 1, "passes": plan["passes"],
    }  # fmt: skip


def test_the_kept_plan_is_a_plan(trained: Trained) -> None:
    plan = load_plan(trained.run / "plan.json")
    assert (plan.pipeline, plan.data, plan.zero, plan.layers, plan.micro_batches) == (2, 2, 1, (2, 2), 2)


def test_one_object_per_update_with_every_promised_number(trained: Trained) -> None:
    header, *lines = metrics(trained.run)
    assert header["run"]["world_size"] == 4 and header["run"]["budget_bytes"] == 2_000_000_000
    updates = [line for line in lines if "eval_loss" not in line]
    assert [u["step"] for u in updates] == list(range(1, 9))
    for u in updates:
        assert {"loss", "grad_norm", "lr", "target_tokens", "step_time_s", "tokens_per_s"} <= u.keys()
        assert isfinite(u["loss"]) and u["grad_norm"] > 0 and 8 * 15 < u["target_tokens"] <= 8 * 16
        assert u["tokens_per_s"] == pytest.approx(u["target_tokens"] / u["step_time_s"])
        assert 0 < u["tail_s"]["mean"] <= u["exposed_s"]["max"] <= u["step_time_s"] * 1.5
        assert len(u["peak_bytes"]) == 4 and all(0 < peak < 2_000_000_000 for peak in u["peak_bytes"])
    # Warm-up to the peak in two steps, then down.
    assert [u["lr"] for u in updates[:2]] == [0.0015, 0.003]
    assert updates[-1]["lr"] < 0.003 and updates[-1]["loss"] < updates[0]["loss"]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [e["step"] for e in evaluations] == [4, 8] and evaluations[1]["eval_loss"] < evaluations[0][
        "eval_loss"
    ]


def test_numbers_have_full_precision(trained: Trained) -> None:
    norms = column(trained.run, "grad_norm")
    assert all(float(repr(norm)) == norm for norm in norms)
    assert max(len(repr(norm)) for norm in norms) > 12


def test_tensorboard_reads_the_same_numbers(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.run / "tensorboard"))
    events.Reload()
    told = [(e.step, e.value) for e in events.Scalars("loss")]
    assert told == [(i, pytest.approx(x, rel=1e-6)) for i, x in enumerate(column(trained.run, "loss"), 1)]
    assert [e.step for e in events.Scalars("eval_loss")] == [4, 8]


def test_the_trace_speaks_of_the_programs_actions(trained: Trained) -> None:
    """Every rank's streams hold the actions of its lane, by the same names, as often."""
    plan = load_plan(trained.run / "plan.json")
    timeline = read_trace(trained.run / "trace.json")
    assert {row.rank for row in timeline.rows} == {0, 1, 2, 3} and timeline.offsets.keys() == {0, 1, 2, 3}
    programs = {form: plan.program(form) for form in ("first", "steady", "flush")}
    for rank in range(4):
        stage, replica = divmod(rank, 2)
        lanes = {form: p.lane(stage, replica) for form, p in programs.items()}
        for stream in STREAMS:
            named = Counter(str(r.action) for r in timeline.rows if r.rank == rank and r.stream == stream)
            known = {str(a) for lane in lanes.values() for a in lane.get(stream, ())}
            assert named.keys() <= known
            assert named.keys() >= {str(a) for a in lanes["steady"].get(stream, ())}
    for row in timeline.rows:
        assert row.end >= row.start


def test_the_trace_opens_in_perfetto(trained: Trained) -> None:
    """Slices of one thread nest, as the trace-event format asks for."""
    events = json.loads((trained.run / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1, 2, 3}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in slices:
        threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        open_ends: list[float] = []
        for start, end in spans:
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


class _Fetches(HTMLParser):
    """Attributes that make a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            fetched = name in ("src", "srcset", "poster", "data") or (name == "href" and tag != "a")
            if fetched and value and not value.startswith(("data:", "#")):
                self.found.append(f"<{tag} {name}={value[:80]}>")


def test_the_report_is_one_file_that_needs_no_network(trained: Trained) -> None:
    page = (trained.run / "report.html").read_text()
    parser = _Fetches()
    parser.feed(page)
    assert parser.found == []
    assert not re.search(r"url\(\s*['\"]?https?:|@import|fetch\(['\"]http", page)
    for shown in ("FORWARD(s0,", "RECV_GRAD", "budget", "loss"):
        assert shown in page


def test_report_writes_it_again_and_prints_the_account(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    copy = shutil.copytree(trained.run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    (copy / "report.html").unlink()
    assert main(["report", str(copy), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["updates"] == 8 and told["tokens"] == sum(column(trained.run, "target_tokens"))
    assert told["loss"] == column(trained.run, "loss")[-1]
    assert (copy / "report.html").stat().st_size > 10_000
    assert main(["report", str(copy)]) == 0
    assert "exposed on" in capsys.readouterr().out


def test_plain_lines_where_there_is_no_terminal(trained: Trained) -> None:
    assert "\x1b" not in trained.said and "\r" not in trained.said
    assert re.search(r"^plan P=2 D=2 ZeRO-1, layers 2/2", trained.said, re.M)
    first = re.search(r"^step 1/8  (.*)$", trained.said, re.M)
    assert first
    for part in (
        r"loss \d\.\d{4}",
        r"[\d,]+ tok/s",
        r"exposed \d+%",
        r"mem [\d.]+ MB/2\.00 GB",
        r"\d+:\d\d left",
    ):
        assert re.search(part, first[1]), (part, first[1])
    assert re.search(r"^step 8/8  eval \d\.\d{4}$", trained.said, re.M)
    assert re.search(r"^report .*report\.html$", trained.said, re.M)


def test_the_last_two_checkpoints_stay(trained: Trained) -> None:
    names = sorted(p.name for p in (trained.run / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008"]
