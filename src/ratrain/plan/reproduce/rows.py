"""The published numbers, from a TOML file: other rows are added there, without code."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratrain.errors import UserError
from ratrain.plan.recipes import NAMES

PAPER = Path(__file__).parent / "paper.toml"


@dataclass(frozen=True)
class StepRow:
    """A published step time.

    recipe      one of recipes.NAMES
    seconds, tokens_per_second  the published number, either
    assumed     what its layout rests on that is not published
    calibrates  whether the one factor is fitted to this row
    scales      whether it is a point of the scaling curve
    degrees     other readings of pipeline and tensor degree
    """

    name: str
    model: str
    recipe: str
    devices: int
    global_batch: int
    published: str
    assumed: str = ""
    pipeline: int | None = None
    tensor: int | None = 1
    seconds: float | None = None
    tokens_per_second: float | None = None
    calibrates: bool = False
    scales: bool = False
    degrees: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def step(self, sequence: int) -> float:
        """Published seconds of a step of `sequence` tokens a sequence."""
        if self.seconds is not None:
            return self.seconds
        assert self.tokens_per_second is not None
        return self.global_batch * sequence / self.tokens_per_second

    @property
    def reading(self) -> str:
        """How its prediction is come by."""
        return "calibrated" if self.calibrates else "assumed" if self.assumed else "predicted"


@dataclass(frozen=True)
class PeakRow:
    """A published peak of bytes a device, on the fewest devices that are published as feasible."""

    name: str
    model: str
    devices: int
    pipeline: int
    zero: int
    bytes: float
    published: str
    assumed: str = ""


@dataclass(frozen=True)
class ModelRow:
    """A model that is priced under every recipe; `pipeline` for recipes that have one."""

    model: str
    devices: int
    global_batch: int
    pipeline: int
    assumed: str = ""


@dataclass(frozen=True)
class ClaimRow:
    """A published number about all rows."""

    claim: str
    value: float
    published: str


@dataclass(frozen=True)
class RecordedRow:
    """What was run rather than simulated: `ours`, from `source`."""

    name: str
    ours: float
    paper: float
    published: str
    source: str


@dataclass(frozen=True)
class Rows:
    """All published rows; `sequence` tokens a sequence."""

    sequence: int
    step: tuple[StepRow, ...]
    peak: tuple[PeakRow, ...]
    model: tuple[ModelRow, ...]
    claim: tuple[ClaimRow, ...]
    recorded: tuple[RecordedRow, ...]

    @property
    def calibrating(self) -> StepRow:
        """The row that the one factor is fitted to."""
        return next(row for row in self.step if row.calibrates)


_KINDS: Mapping[str, type] = {
    "step": StepRow,
    "peak": PeakRow,
    "model": ModelRow,
    "claim": ClaimRow,
    "recorded": RecordedRow,
}


def load_rows(path: Path = PAPER) -> Rows:
    """The rows of a file; UserError in one line if it is missing, damaged, or has a row that lacks something."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"rows {path}: {error.strerror}; give a TOML file such as {PAPER.name}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"rows {path}: not TOML ({error}); compare {PAPER.name}") from None
    kinds = {kind: tuple(_row(path, kind, row) for row in table.get(kind, [])) for kind in _KINDS}
    if sum(row.calibrates for row in kinds["step"]) != 1:
        raise UserError(f"rows {path}: exactly one [[step]] must have calibrates = true")
    return Rows(int(table.get("sequence", 2048)), **kinds)


def _row(path: Path, kind: str, row: Mapping[str, Any]) -> Any:
    name = row.get("name", row.get("model", "?"))
    try:
        made = _KINDS[kind](**row)
    except TypeError as error:
        raise UserError(f"rows {path}: [[{kind}]] {name}: {str(error).split('() ')[-1]}") from None
    if isinstance(made, StepRow):
        if made.recipe not in NAMES:
            raise UserError(
                f"rows {path}: {name}: no recipe {made.recipe!r}; expected one of {', '.join(NAMES)}"
            )
        if (made.seconds is None) == (made.tokens_per_second is None):
            raise UserError(f"rows {path}: {name}: give either seconds or tokens_per_second")
    return made
