"""Progress lines, tables and TensorBoard events."""

import io
import subprocess
import sys
from pathlib import Path

from ratrain.report.table import render_table
from ratrain.report.tensorboard import TensorBoardWriter
from ratrain.report.terminal import Progress


def metrics(step: int) -> dict[str, object]:
    return {
        "step": step,
        "loss": 4.0,
        "step_time_s": 0.5,
        "tokens_per_s": 12345.6,
        "exposed_s": {"mean": 0.1, "max": 0.2},
        "peak_bytes": [1_200_000_000, 1_500_000_000],
        "skipped": False,
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress_lines(steps: int, seconds_per_step: float, **options: int) -> list[str]:
    out, now = io.StringIO(), [0.0]
    progress = Progress(2_000_000_000, out, clock=lambda: now[0], **options)
    progress.start(steps)
    for step in range(1, steps + 1):
        now[0] += seconds_per_step
        progress.update(metrics(step))
    progress.stop()
    return out.getvalue().splitlines()


def test_a_line_tells_everything() -> None:
    line = progress_lines(40, 0.1)[0]
    expected = ["step 1/40", "loss 4.0000", "12,346 tok/s", "exposed 20%", "0:20 left", "mem 1.50/2.00 GB"]
    assert line.split("  ") == expected and len(line) <= 80


def test_plain_lines_come_every_n_steps_and_with_the_last() -> None:
    steps = [line.split()[1] for line in progress_lines(25, 0.01)]
    assert steps == ["1/25", "10/25", "20/25", "25/25"]


def test_plain_lines_come_every_few_seconds_when_steps_are_slow() -> None:
    steps = [line.split()[1] for line in progress_lines(9, 3.0, every_steps=100)]
    assert steps == ["1/9", "3/9", "5/9", "7/9", "9/9"]


def test_evaluations_notes_and_missing_numbers() -> None:
    out = io.StringIO()
    progress = Progress(None, out)
    progress.start(5, done=2)
    progress.update({"step": 3, "loss": float("nan"), "skipped": True})
    progress.update({"step": 3, "eval_loss": 3.25, "eval_tokens": 10})
    progress.update({"run": {}})
    progress.note("saved [step 3]")
    progress.stop()
    assert out.getvalue().splitlines() == [
        "step 3/5  loss nan  skipped: gradient not finite",
        "step 3/5  eval 3.2500",
        "saved [step 3]",
    ]


def test_one_live_line_on_a_terminal() -> None:
    out = Terminal()
    progress = Progress(None, out)
    progress.start(3)
    for step in (1, 2, 3):
        progress.update(metrics(step))
    progress.note("note [bold]")
    progress.update({"step": 3, "eval_loss": 2.0})
    progress.stop()
    progress.stop()
    text = out.getvalue()
    assert "step 1/3" in text and "step 3/3" in text and "note [bold]" in text and "eval 2.0000" in text
    assert text.index("note [bold]") < text.rindex("step 3/3")


def test_table_aligns_numbers_right() -> None:
    assert render_table(("name", "size"), [("a", "1.5"), ("long", 20)]).splitlines() == [
        "name  size",
        "----  ----",
        "a      1.5",
        "long    20",
    ]
    assert render_table(("name",), []) == "name\n----"


def test_tensorboard_reads_the_events_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with TensorBoardWriter(tmp_path) as writer:
        writer.write({"run": {"world_size": 4}})
        writer.write(metrics(7))
        writer.write({"step": 7, "eval_loss": 2.5})
    (file,) = tmp_path.iterdir()
    found = {
        value.tag: (event.step, value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found["loss"] == (7, 4.0)
    assert found["eval_loss"] == (7, 2.5)
    assert found["peak_bytes/1"] == (7, 1.5e9)
    assert found["skipped"] == (7, 0.0)
    assert abs(found["exposed_s/mean"][1] - 0.1) < 1e-6


def test_nothing_here_imports_torch_or_plotting() -> None:
    code = (
        "import sys, ratrain.report.command, ratrain.report.tensorboard, ratrain.report.terminal\n"
        "print([m for m in ('torch', 'plotly', 'matplotlib', 'rich', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
