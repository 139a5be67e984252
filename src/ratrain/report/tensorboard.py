"""TensorBoard events from metric objects, without torch or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class TensorBoardWriter:
    """Appends every number of a metrics object as a scalar to an events file in `folder`.

    Nested values become paths: ``exposed_s/max``, ``peak_bytes/3`` (rank 3).
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Writes one object of metrics.jsonl; one without `step` (the header) is passed over."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if "step" not in metrics:
            return
        scalars = [(path, value) for path, value in _scalars("", metrics) if path != "step"]
        summary = Summary(value=[Summary.Value(tag=path, simple_value=value) for path, value in scalars])
        self._writer.add_event(Event(wall_time=time.time(), step=int(metrics["step"]), summary=summary))

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _scalars(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _scalars(f"{path}/{key}" if path else str(key), inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _scalars(f"{path}/{index}", inner)
    elif isinstance(value, int | float):  # bool too: 0 or 1
        yield path, float(value)
