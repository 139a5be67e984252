"""Actions: the words that builder, checker, simulator, executor and reports share."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does. Durations and bytes are costs and live elsewhere."""

    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"
    RECOVER = "RECOVER"
    SEND_ACT = "SEND_ACT"
    RECV_ACT = "RECV_ACT"
    SEND_GRAD = "SEND_GRAD"
    RECV_GRAD = "RECV_GRAD"
    GRAD_SYNC = "GRAD_SYNC"
    TIED_SYNC = "TIED_SYNC"
    GRAD_NORM = "GRAD_NORM"
    UPDATE_SHARD = "UPDATE_SHARD"
    PREFETCH_VIEW = "PREFETCH_VIEW"
    RELEASE = "RELEASE"

    __hash__ = str.__hash__  # Enum's own is written in Python, and actions are keys of everything


GATHER_PHASES = ("fwd", "rec", "bwd")
RELEASE_PHASES = ("act", "grad", "view.fwd", "view.rec", "view.bwd")
"""A view gathered for one micro-batch (ZeRO-3) is released once per gather: the release names the gather."""


class Action(NamedTuple):
    """One step of one rank's work.

    `unit` names a block (FORWARD, BACKWARD, RECOVER, RELEASE act) or a state unit (the rest); it is None
    where the action concerns the whole stage. `lag` 1 marks the previous step's work placed inside this step.
    `str(action)` and `parse(text)` are inverse, e.g. ``PREFETCH_VIEW(s0,layer3,fwd,lag1)``.
    """

    kind: Kind
    stage: int
    unit: str | None = None
    microbatch: int | None = None
    phase: str | None = None
    lag: int = 0

    def __str__(self) -> str:
        parts = [f"s{self.stage}"]
        if self.unit is not None:
            parts.append(self.unit)
        if self.microbatch is not None:
            parts.append(f"m{self.microbatch}")
        if self.phase is not None:
            parts.append(self.phase)
        if self.lag:
            parts.append(f"lag{self.lag}")
        return f"{self.kind.value}({','.join(parts)})"


_TEXT = re.compile(
    r"(?P<kind>[A-Z_]+)\(s(?P<stage>\d+)(?:,(?P<unit>embed|head|tied|layer\d+))?(?:,m(?P<microbatch>\d+))?"
    r"(?:,(?P<phase>[a-z.]+))??(?:,lag(?P<lag>\d+))?\)"
)


def parse(text: str) -> Action:
    """The action that prints as `text`; raises ValueError for anything else."""
    match = _TEXT.fullmatch(text)
    if match is None or match["kind"] not in Kind.__members__:
        raise ValueError(f"not an action: {text!r}")
    phase = match["phase"]
    if phase is not None and phase not in GATHER_PHASES + RELEASE_PHASES:
        raise ValueError(f"unknown phase {phase!r} in {text!r}")
    return Action(
        Kind(match["kind"]),
        int(match["stage"]),
        match["unit"],
        None if match["microbatch"] is None else int(match["microbatch"]),
        phase,
        int(match["lag"] or 0),
    )
