"""What a plan is expected to need and to do: memory per stage, and time once it has been simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank of a stage at its peak.

    runtime        what the process holds before its model
    views          parameters as forward and backward read them; under ZeRO-3 the owned slices
    gathered       ZeRO-3: views of the units that exist whole at one time
    gradients      accumulators (ZeRO-2, 3: the owned slices)
    unreduced      ZeRO-2, 3: whole gradients of the units that are not yet reduced
    shard          moments, and the master weights unless they are slices of the view
    communication  messages between stages, and what a reduction receives into
    logits         those of one micro-batch with their gradient (last stage)
    activations    all else that is saved or at work at the peak
    """

    runtime: int
    views: int
    gathered: int
    gradients: int
    unreduced: int
    shard: int
    communication: int
    logits: int = 0
    activations: int = 0

    @property
    def constant(self) -> int:
        """What is there for the whole step, before any activation."""
        return self.total - self.logits - self.activations

    @property
    def total(self) -> int:
        """The peak."""
        return (
            self.runtime + self.views + self.gathered + self.gradients + self.unreduced + self.shard
            + self.communication + self.logits + self.activations
        )  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """memory     per stage
    step       seconds from a step's first forward to the next step's, None if not simulated
    exposed    mean over ranks of the step's seconds that are neither forward nor backward
    tail       longest over ranks of the exposed seconds after the last backward
    bubble     share of the devices' time that a perfectly shared-out computation would not need
    source     where the costs come from
    """

    memory: tuple[StageMemory, ...]
    step: float | None = None
    exposed: float | None = None
    tail: float | None = None
    bubble: float | None = None
    source: str = ""

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(m.total for m in self.memory)

    def to_json(self) -> dict[str, object]:
        """A plain form; `total` of each stage is added for readers."""
        table = dataclasses.asdict(self)
        for stage, memory in zip(table["memory"], self.memory):
            stage["total"] = memory.total
        return table

    @classmethod
    def from_json(cls, table: Mapping[str, object]) -> Forecast:
        """Inverse of `to_json`; KeyError, TypeError or ValueError for anything else."""
        content = dict(table)
        stages = []
        for stage in content.pop("memory"):  # type: ignore[attr-defined]
            stages.append(StageMemory(**{k: int(v) for k, v in stage.items() if k != "total"}))
        numbers = {k: None if content[k] is None else float(content[k]) for k in _NUMBERS}  # type: ignore[arg-type]
        return cls(memory=tuple(stages), source=str(content["source"]), **numbers)


_NUMBERS = ("step", "exposed", "tail", "bubble")
