"""One rank's own numbers of a step, as a fixed-length row that GRAD_NORM gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ratrain.program.action import Kind
from ratrain.program.timeline import Row, account

CAUSES = (*(kind.value for kind in Kind), "idle")
ROW = 5 + len(CAUSES)
EMPTY = (-1.0, *(0.0,) * (ROW - 1))


@dataclass(frozen=True)
class Ledger:
    """The compute rows of a step whose account is still open: it closes at the next step's first FORWARD.

    Frozen, because GRAD_NORM of the next step closes it on another thread.
    """

    step: int | None = None
    rows: tuple[Row, ...] = ()

    @classmethod
    def opened(cls, step: int, rows: Sequence[Row]) -> Ledger:
        """The ledger of `step`, whose program has run: what precedes its first FORWARD is the step before's."""
        compute = _compute(rows)
        return cls(step, tuple(compute[_first_forward(compute) :]))

    def extended(self, rows: Sequence[Row]) -> Ledger:
        """With the rows of a program that does nothing but finish the step (flush)."""
        return Ledger(self.step, (*self.rows, *_compute(rows)))

    def close(self, following: Sequence[Row]) -> tuple[float, ...]:
        """The numbers of the open step, given the rows so far of the program that follows it."""
        if self.step is None:
            return EMPTY
        compute = _compute(following)
        cut = _first_forward(compute)
        end = compute[cut] if cut < len(compute) else None
        booked = account([*self.rows, *compute[:cut]], end)
        if booked is None:
            return EMPTY
        causes = tuple(booked.causes.get(name, 0.0) for name in CAUSES)
        return (float(self.step), booked.step, booked.exposed, booked.tail, float(peak_bytes()), *causes)


def _compute(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r.stream == "compute"]


def _first_forward(compute: Sequence[Row]) -> int:
    return next((i for i, r in enumerate(compute) if r.action.kind is Kind.FORWARD), len(compute))


def summarise(table: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Metrics of a step from every rank's row."""
    column = list(zip(*table))
    step, exposed, tail = column[1], column[2], column[3]
    count = len(table)
    return {
        "step_time_s": max(step),
        "exposed_s": {"max": max(exposed), "mean": sum(exposed) / count},
        "tail_s": {"max": max(tail), "mean": sum(tail) / count},
        "exposed_by_cause": {
            name: sum(values) / count for name, values in zip(CAUSES, column[5:]) if any(values)
        },
        "peak_bytes": [int(b) for b in column[4]],
    }


def peak_bytes() -> int:
    """Most memory this process has had: of the device on CUDA, resident on the host otherwise."""
    if torch.cuda.is_available() and torch.cuda.memory_allocated():
        return torch.cuda.max_memory_reserved()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
