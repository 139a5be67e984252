"""What a table of the reproduction is made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

READINGS = {
    "calibrated": "the one factor was fitted to this number",
    "predicted": "nothing but published facts, the platform file and the one factor went in",
    "assumed": "predicted, on a reading of something that is not published",
    "recorded": "from runs whose results are recorded in docs/",
}


@dataclass(frozen=True)
class Cell:
    """One number of ours beside the paper's.

    unit       "s", "bytes", "x", "%" (a share of 1), "clusters"
    ours       None: does not fit; `note` says by how much
    paper      None: not published, or not known to us
    reading    one of READINGS
    low, high  over the plausible degrees, where the degree is not known
    note       layout, or what it rests on
    """

    row: str
    quantity: str
    unit: str
    ours: float | None
    paper: float | None
    reading: str
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return self.ours / self.paper if self.ours is not None and self.paper else None

    @property
    def brackets(self) -> bool | None:
        """Whether the range holds the paper's number; None without either."""
        if self.low is None or self.high is None or self.paper is None:
            return None
        return self.low <= self.paper <= self.high

    def to_json(self) -> dict[str, Any]:
        """A plain form."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "brackets": self.brackets}


@dataclass(frozen=True)
class Table:
    """name is for --only; words say what it rests on."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    words: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain form."""
        cells = [cell.to_json() for cell in self.cells]
        return {"name": self.name, "title": self.title, "cells": cells, "words": list(self.words)}
