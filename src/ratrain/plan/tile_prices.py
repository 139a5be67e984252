"""Seconds of operators on the MT-3000, remembered from one planning to the next.

Choosing and pricing the tile schedules of one model takes a second of computing, half of what planning it
takes. Prices depend on the chip's file and on the code that prices, so that a file of prices carries a
fingerprint of both. It lies in the user's cache folder (`$XDG_CACHE_HOME/ratrain`), may be deleted at any
time, and is never needed: where it cannot be read or written, everything is priced again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from pathlib import Path

from ratrain.machine.mt3000 import chip as chips
from ratrain.machine.mt3000.chip import Chip
from ratrain.model.operators import Operator


class TilePrices:
    """Prices of one chip, in `folder` (None: the user's cache)."""

    def __init__(self, chip: Chip, folder: Path | None = None) -> None:
        self.chip = chip
        self.file = (folder or cache_folder()) / f"mt3000-prices-{fingerprint(chip)}.json"
        self.known = _read(self.file)

    def seconds(self, operator: Operator, backward: bool) -> float:
        """Seconds of one operator, forward or backward, launches included."""
        o = operator
        key = f"{o.name} {o.kind} {o.rows} {o.columns} {o.inner} {o.batch} {o.elements} {backward:d}"
        if key not in self.known:
            from ratrain.machine.mt3000.profile import operator_seconds

            self.known[key] = operator_seconds(self.chip, operator, backward)
            _write(self.file, self.known)
        return self.known[key]


def cache_folder() -> Path:
    """Where RATrain may keep what it can compute again."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path("~/.cache").expanduser()) / "ratrain"


def fingerprint(chip: Chip) -> str:
    """Of the chip's numbers and of the code that chooses and prices its schedules."""
    digest = hashlib.sha256(repr(chip).encode())
    for source in sorted(Path(chips.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _read(file: Path) -> dict[str, float]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    sound = isinstance(known, dict) and all(
        isinstance(v, float) and math.isfinite(v) and v >= 0 for v in known.values()
    )
    return known if sound else {}


def _write(file: Path, known: dict[str, float]) -> None:
    """Whole or not at all; of two planners at once the later one's prices stay."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_text(json.dumps(known), encoding="utf-8")
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)
