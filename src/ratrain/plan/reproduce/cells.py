"""What a table of the reproduction is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ratrain.config import format_bytes

READINGS = {
    "calibrated": "the one factor was fitted to this number",
    "predicted": "nothing but published facts, the platform file and the one factor went in",
    "assumed": "predicted, on a reading of something that is not published",
    "recorded": "from runs whose results are recorded in docs/",
    "measured": "wall-clock, from runs on this machine just now",
}


UNITS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {
        "s": lambda value: f"{value:,.2f} s",
        "bytes": lambda value: format_bytes(round(value)),
        "x": lambda value: f"{value:.3f}x",
        "%": lambda value: f"{100 * value:.4g} %",
        "clusters": lambda value: f"{value:g}",
    }
)
"""How a value of each unit is printed; "%" holds a share of 1."""

HEADER = ("row", "quantity", "ours", "the paper's", "ratio", "reading", "other degrees", "notes")


@dataclass(frozen=True)
class Cell:
    """One number of ours beside the paper's.

    unit       one of UNITS
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

    def words(self) -> tuple[str, ...]:
        """As text, under HEADER."""
        show = UNITS[self.unit]

        def text(value: float | None) -> str:
            return "" if value is None else show(value)

        degrees = ""
        if self.low is not None and self.high is not None:
            degrees = f"{show(self.low)} to {show(self.high)}"
            if self.brackets is not None:
                degrees += ", holds it" if self.brackets else ", does not hold it"
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        ours = "does not fit" if self.ours is None else text(self.ours)
        return (self.row, self.quantity, ours, text(self.paper), ratio, self.reading, degrees, self.note)

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
