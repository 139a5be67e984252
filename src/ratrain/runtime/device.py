"""Where work of a stream runs, and how one stream waits for another: the only place that knows of CUDA.

On the CPU an action is done when its handler returns. On CUDA a handler only enqueues: each program stream
has a CUDA stream of its own, an action leaves an event, and whoever needs it lets its own stream wait for
that event; the host does not wait.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class HostStreams:
    """CPU: streams are threads, and finished means finished."""

    def on(self, stream: str) -> AbstractContextManager[Any]:
        """Context in which a handler of `stream` runs."""
        return nullcontext()

    def mark(self) -> object | None:
        """What a later action waits for, taken after a handler has returned."""
        return None

    def await_marks(self, marks: list[object]) -> None:
        """Lets the current stream wait for what other streams have enqueued."""

    def use(self, tensor: Tensor) -> None:
        """Says that the current stream uses `tensor`, which another stream allocated."""

    def drain(self) -> None:
        """Returns when everything enqueued has run."""


class CudaStreams(HostStreams):
    """CUDA: one stream per program stream, events between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def on(self, stream: str) -> AbstractContextManager[Any]:
        if stream not in self._streams:
            # Parameters were filled on the default stream.
            torch.cuda.synchronize(self.device)
            self._streams[stream] = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._streams[stream])

    def mark(self) -> object | None:
        return torch.cuda.current_stream(self.device).record_event()

    def await_marks(self, marks: list[object]) -> None:
        current = torch.cuda.current_stream(self.device)
        for mark in marks:
            assert isinstance(mark, torch.cuda.Event)
            current.wait_event(mark)

    def use(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)


def streams_of(device: torch.device) -> HostStreams:
    """The streams of `device`."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
