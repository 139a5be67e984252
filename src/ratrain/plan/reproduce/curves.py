"""Losses of runs that should be alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Curves:
    """Losses of every update, by run: the first is what the others are held against."""

    losses: Mapping[str, tuple[float, ...]]

    def deviation(self, name: str) -> tuple[float, ...]:
        """Relative, of every update."""
        first = next(iter(self.losses.values()))
        return tuple(abs(a - b) / b for a, b in zip(self.losses[name], first, strict=True))
