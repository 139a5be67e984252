"""The run's page and its numbers: steps, accounts, the forecast subtracted from the measurement."""

import json
import re
from pathlib import Path

import pytest

from ratrain.errors import UserError
from ratrain.program.action import Kind, parse
from ratrain.program.layout import Layout
from ratrain.program.passes import PASSES
from ratrain.program.timeline import Timeline
from ratrain.report.account import account_of, layout_words, seconds
from ratrain.report.command import report_command
from ratrain.report.compare import misses
from ratrain.report.forecast import Forecast, read_forecast, write_forecast
from ratrain.report.gantt import ROW_FIELDS, gantt
from ratrain.report.html import write_report, write_simulation
from ratrain.report.run_folder import read_run
from ratrain.report.steps import Step, steps_of, typical
from report_samples import BUDGET, MILLISECONDS, mesh, run_program, write_run


def layout(pipeline: int, layers: int, **choices: int) -> Layout:
    plain = Layout.even(pipeline, layers, **choices)
    rungs = tuple(tuple("inputs" if b.startswith("layer") else "keep" for b in s) for s in plain.stages)
    return plain.with_(rungs=rungs)


SMALL = layout(2, 4, replicas=2, microbatches=6)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    write_run(folder, SMALL, updates=60)
    return folder


def one_step(timeline: Timeline) -> Step:
    step = typical(steps_of(timeline))
    assert step is not None
    return step


def test_steps_are_closed_by_the_next_forward() -> None:
    timeline = run_program(SMALL, steps=4)
    steps = steps_of(timeline)
    assert [s.number for s in steps] == [0, 1, 2]
    for step in steps:
        assert step.accounts.keys() == {0, 1, 2, 3}
        for rank, entry in step.accounts.items():
            assert entry.exposed == pytest.approx(sum(entry.causes.values()))
            assert any(r.start == step.start for rows in step.rows.values() for r in rows)
            beyond = [r for r in step.rows[rank] if r.end <= step.start or r.start >= step.end]
            assert len(beyond) <= 1 and all(r.stream == "compute" for r in beyond)
    assert steps[1].time == pytest.approx(steps[2].time)  # steady
    assert list(steps[0].causes.values()) == sorted(steps[0].causes.values(), reverse=True)


def test_the_last_step_stands_alone_only_when_it_is_the_only_one() -> None:
    assert [s.number for s in steps_of(run_program(SMALL, steps=1))] == [0]
    assert steps_of(Timeline()) == [] and typical([]) is None


def test_clock_offsets_do_not_change_a_step() -> None:
    plain = run_program(SMALL)
    shifted = Timeline(
        [r._replace(start=r.start - 10 * r.rank, end=r.end - 10 * r.rank) for r in plain.rows],
        {rank: 10.0 * rank for rank in range(4)},
    )
    assert one_step(shifted).time == pytest.approx(one_step(plain).time)
    assert one_step(shifted).end == pytest.approx(one_step(plain).end)


@pytest.mark.parametrize("passes", [(), tuple(PASSES)])
def test_gantt_data_decodes_to_the_rows(passes: tuple[str, ...]) -> None:
    step = one_step(run_program(SMALL, passes, noise=0.1))
    data = json.loads(json.dumps(gantt({"measured": step}, {"measured": mesh(SMALL)})))
    (lanes,) = data["sets"]
    assert [(r["replica"], r["stage"]) for r in lanes["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert lanes["window"] == 1_000_000

    def name(shape: int, microbatch: int) -> str:
        return data["shapes"][shape].replace(",m#", f",m{microbatch}")

    for rank in lanes["ranks"]:
        for stream, flat in rank["streams"].items():
            rows = [
                r for r in step.rows[rank["rank"]] if r.stream == stream and r.action.kind is not Kind.RELEASE
            ]
            width, clock = len(ROW_FIELDS), 0
            assert len(flat) == width * len(rows)
            for i, row in enumerate(rows):
                gap, duration, shape, m, waited, waited_m, other = flat[i * width : (i + 1) * width]
                assert name(shape, m) == str(row.action)
                assert (name(waited, waited_m) if waited >= 0 else None) == (
                    str(row.waited_for) if row.waited_for else None
                )
                assert (clock + gap) * data["tick"] == pytest.approx(row.start - step.start, abs=data["tick"])
                assert duration * data["tick"] == pytest.approx(row.end - row.start, abs=2 * data["tick"])
                assert other == row.step - step.number
                clock += gap + duration


def test_large_steps_are_thinned_but_keep_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratrain.report.gantt.ROWS", 50)
    step = one_step(run_program(SMALL))
    data = gantt({"measured": step}, {"measured": mesh(SMALL)})
    (lanes,) = data["sets"]
    assert {r["replica"] for r in lanes["ranks"]} == {0} and lanes["note"] == "replica 0 of 2"
    assert any(".." in shape for shape in data["shapes"])
    flat = lanes["ranks"][0]["streams"]["compute"]
    width = len(ROW_FIELDS)
    seen = {flat[i + 3] for i in range(0, len(flat), width) if "BACKWARD" in data["shapes"][flat[i + 2]]}
    assert seen == set(range(6))


def test_misses_name_the_work_that_was_off() -> None:
    told = one_step(run_program(SMALL, replicas=1))
    took = one_step(run_program(SMALL, slower={Kind.RECOVER: 1.5}))
    places = mesh(SMALL)
    found = misses(took, told, places, [p for p in places if p.replica == 0])
    worst = found[0]
    assert (worst.action.kind, worst.place.stage) == (Kind.RECOVER, 0)
    assert worst.measured - worst.forecast == pytest.approx(0.5e-3 * MILLISECONDS[Kind.RECOVER])
    assert worst.count == 2 * 6  # two layers, six micro-batches
    assert worst.total == pytest.approx(12 * 0.5e-3 * MILLISECONDS[Kind.RECOVER])
    sorts = {(m.action.kind, (m.action.unit or "").rstrip("0123456789"), m.action.phase) for m in found}
    assert len(sorts) == len(found)
    assert not any(m.action.kind in (Kind.RECV_ACT, Kind.RECV_GRAD) for m in found)


def test_forecast_reads_back_and_answers_for_absent_replicas(tmp_path: Path) -> None:
    timeline = run_program(SMALL, replicas=1)
    places = tuple(p for p in mesh(SMALL) if p.replica == 0)
    forecast = Forecast(timeline, places, (10, 20), BUDGET)
    write_forecast(forecast, tmp_path / "forecast.json")
    assert read_forecast(tmp_path / "forecast.json") == forecast
    assert [forecast.peak_of(p) for p in mesh(SMALL)] == [10, 10, 20, 20]
    with pytest.raises(ValueError, match="peaks"):
        Forecast(timeline, places, (10,))
    (tmp_path / "other.json").write_text('{"version": 99}')
    with pytest.raises(UserError, match="99"):
        read_forecast(tmp_path / "other.json")


def test_page_is_self_contained_and_complete(run_dir: Path) -> None:
    path = write_report(run_dir)
    text = path.read_text()
    assert path == run_dir / "report.html" and path.stat().st_size < 2_000_000
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", text)
    for expected in (
        "unigram entropy",
        "budget",
        "furthest off",
        "Exposed time by cause",
        "prefers-color-scheme",
    ):
        assert expected in text
    data = json.loads(re.search(r'id="gantt-data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert [s["name"] for s in data["sets"]] == ["forecast", "measured"]


def test_colours_cover_every_kind_in_light_and_dark(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    light, dark = text.split("prefers-color-scheme: dark", 1)
    for name in [*(k.value for k in Kind), "idle"]:
        assert f"--{name}:" in light and f"--{name}:" in dark


def test_a_sixteen_stage_page_stays_small(tmp_path: Path) -> None:
    write_run(tmp_path / "deep", layout(16, 32, microbatches=32), updates=3)
    assert write_report(tmp_path / "deep").stat().st_size < 1_000_000


def test_page_of_a_simulation(tmp_path: Path) -> None:
    forecast = Forecast(run_program(SMALL, replicas=1), peak_bytes=(3_000_000_000, 1), budget_bytes=BUDGET)
    write_simulation(forecast, tmp_path / "s.html", "what <if>", "A plan.")
    text = (tmp_path / "s.html").read_text()
    assert "what &lt;if&gt;" in text and "step time, forecast" in text and "3.00 GB (150%)" in text


def test_page_of_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"run": {"world_size": 1}}\n{"step": 1, "loss": 8.3}\n{"step": 2, "lo'
    )
    assert "report" in write_report(tmp_path).name
    assert account_of(read_run(tmp_path)).updates == 1
    (tmp_path / "metrics.jsonl").write_text("")
    write_report(tmp_path)


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": float("nan") if n == 2 else 5.0 - n} for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "nan" not in re.sub(r"<script.*?</script>", "", write_report(tmp_path).read_text(), flags=re.S)


def test_a_step_that_was_repeated_after_a_resume_counts_once(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": 1.0 * n, "target_tokens": 10} for n in (1, 2, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    account = account_of(read_run(tmp_path))
    assert (account.updates, account.tokens) == (3, 30)


def test_command_prints_the_account(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_command(run_dir, as_json=False)
    text = capsys.readouterr().out
    assert "2 stages × 2 replicas" in text and "below the corpus's unigram entropy" in text
    assert "furthest off" in text and str(run_dir / "report.html") in text
    report_command(run_dir, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["updates"] == 60 and data["tokens"] == 60 * 16384
    assert data["budget_bytes"] == BUDGET and len(data["furthest_off"]) == 3
    assert set(data["forecast"]) == {"step_time", "exposed", "tail", "causes"}
    for entry in data["furthest_off"]:
        assert str(parse(entry["action"])) == entry["action"]


@pytest.mark.parametrize("content", [None, "folder", '{"step": "x"}\n{"step": 2}'])
def test_what_is_no_run_folder_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
        if content != "folder":
            (folder / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError) as error:
        report_command(folder, as_json=False)
    assert "\n" not in str(error.value) and "run" in str(error.value)
    assert not (folder / "report.html").exists()


def test_words_for_layouts_and_durations() -> None:
    plan = {"layers": [1, 3, 3, 0], "data": 1, "zero": 2, "global_batch": 8, "micro_batch": 8}
    told = "4 stages × 1 replica, layers 1 + 2×3 + 0, ZeRO-2, 1 micro-batch"
    assert layout_words(plan, 4) == told
    assert (
        layout_words({**plan, "rungs": [["keep"], ["inputs"] * 2]}, 4)
        == f"{told}, recovery inputs on 2 blocks"
    )
    assert layout_words({}, 3) == "3 ranks"
    assert [seconds(s) for s in (12.345, 0.4321, 0.00123, 4.5e-5)] == ["12.3 s", "432 ms", "1.23 ms", "45 µs"]
