"""Training progress in the terminal: one live line, or plain lines where the output is not a terminal."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from ratrain.config import format_bytes

if TYPE_CHECKING:
    from rich.live import Live

_RECENT = 20
"""Steps whose median time stands for the next ones."""


class Progress:
    """Shows step, loss, tokens/s, exposed share, memory of budget, and time left.

    budget_bytes   memory of one device, None where no budget is set
    stream         where to; live when it is a terminal
    every_steps, every_seconds   not a terminal: a line at least that often, and for the first and last step
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        stream: TextIO = sys.stdout,
        every_steps: int = 10,
        every_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget = budget_bytes
        self._stream = stream
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._clock = clock
        self._total, self._done = 0, 0
        self._shown_at: float | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._live: Live | None = None

    def start(self, total: int, done: int = 0) -> None:
        """`total` steps in all, of which a resumed run has `done` behind it."""
        self._total, self._done = total, done
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Takes one object of metrics.jsonl: an update or an evaluation."""
        if "eval_loss" in metrics:
            self.note(f"step {metrics['step']}/{self._total}  eval {metrics['eval_loss']:.4f}")
            return
        if "step" not in metrics:
            return
        self._done = int(metrics["step"])
        if metrics.get("step_time_s") is not None:
            self._recent.append(float(metrics["step_time_s"]))
        if self._live is not None:
            from rich.text import Text

            line = self.line(metrics)
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._due():
            self._shown_at = self._clock()
            self._print(self.line(metrics))

    def note(self, text: str) -> None:
        """A sentence of its own, above the live line."""
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            self._print(text)

    def stop(self) -> None:
        """Leaves the last line standing. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, metrics: Mapping[str, Any]) -> str:
        """The line for one update: 80 columns hold it, and a narrower terminal cuts its end off."""
        parts = [f"step {self._done}/{self._total}"]
        if metrics.get("loss") is not None:
            parts.append(f"loss {metrics['loss']:.4f}")
        if metrics.get("skipped"):
            parts.append("skipped: gradient not finite")
        if metrics.get("tokens_per_s") is not None:
            parts.append(f"{metrics['tokens_per_s']:,.0f} tok/s")
        exposed, step_time = metrics.get("exposed_s"), metrics.get("step_time_s")
        if exposed and step_time:
            parts.append(f"exposed {exposed['mean'] / step_time:.0%}")
        if self._recent:
            left = statistics.median(self._recent) * max(self._total - self._done, 0)
            parts.append(f"{_clock_text(left)} left")
        if metrics.get("peak_bytes"):
            parts.append(f"mem {_of(max(metrics['peak_bytes']), self._budget)}")
        return "  ".join(parts)

    def _due(self) -> bool:
        return (
            self._shown_at is None
            or self._done % self._every_steps == 0
            or self._done >= self._total
            or self._clock() - self._shown_at >= self._every_seconds
        )

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _of(used: float, budget: int | None) -> str:
    """E.g. 1.50/2.00 GB, or both units where they differ."""
    told = format_bytes(used)
    if budget is None:
        return told
    number, unit = told.split()
    most = format_bytes(budget)
    return f"{number}/{most}" if most.endswith(f" {unit}") else f"{told}/{most}"


def _clock_text(value: float) -> str:
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
