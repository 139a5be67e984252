"""The run folder's record while a run goes on: metrics.jsonl, TensorBoard events, trace.json, the live line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratrain.program.timeline import Timeline
from ratrain.report.places import Place
from ratrain.report.tensorboard import TensorBoardWriter
from ratrain.report.terminal import Progress
from ratrain.report.trace import write_trace

METRICS, TRACE, EVENTS = "metrics.jsonl", "trace.json", "tensorboard"


class RunRecorder:
    """Takes what the trainer tells on rank 0."""

    def __init__(
        self, folder: Path, progress: Progress, header: Mapping[str, Any], places: Sequence[Place], done: int
    ) -> None:
        """
        header  the run's own facts, first line of metrics.jsonl
        done    steps that a resumed run has behind it: later lines of an earlier attempt are dropped
        """
        self._folder, self._progress, self._places = folder, progress, tuple(places)
        path = folder / METRICS
        kept = [line for line in _lines(path) if 0 < int(line.get("step", 0)) <= done] if done else []
        aside = path.with_suffix(".partial")
        with aside.open("w") as out:
            for line in [{"run": dict(header)}, *kept]:
                out.write(json.dumps(line) + "\n")
        aside.replace(path)
        self._metrics = path.open("a")
        if not done:  # a fresh run: its curves must not be drawn over an earlier attempt's
            shutil.rmtree(folder / EVENTS, ignore_errors=True)
        self._board = TensorBoardWriter(folder / EVENTS)

    def update(self, metrics: Mapping[str, Any]) -> None:
        """One object per update."""
        self._write(metrics)
        self._progress.update(metrics)

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """One object per evaluation."""
        self._write(metrics)
        self._progress.update(metrics)

    def note(self, text: str) -> None:
        """A sentence for the terminal."""
        self._progress.note(text)

    def trace(self, timeline: Timeline) -> None:
        """The measured timeline of the last steps."""
        write_trace(timeline, self._folder / TRACE, self._places)

    def close(self) -> None:
        """Ends the live line and closes the files."""
        self._progress.stop()
        self._metrics.close()
        self._board.close()

    def _write(self, metrics: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(metrics) + "\n")
        self._metrics.flush()
        self._board.write(dict(metrics))


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # cut off by a kill
            continue
    return found
