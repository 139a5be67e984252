"""Places: which stage and replica a rank is, so that reports can name it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ratrain.program.timeline import Timeline


class Place(NamedTuple):
    """One rank's coordinates in the mesh; `part` is its place among the tensor ranks, None where it is alone."""

    rank: int
    stage: int
    replica: int
    part: int | None = None

    @property
    def title(self) -> str:
        """E.g. ``rank 2 (stage 1, replica 0)``."""
        part = "" if self.part is None else f", part {self.part}"
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica}{part})"

    def to_json(self) -> dict[str, int]:
        """A plain form."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Place:
        """Inverse of `to_json`; raises KeyError where a coordinate is missing."""
        return cls(int(data["rank"]), int(data["stage"]), int(data["replica"]), data.get("part"))


def places_of(timeline: Timeline, known: Sequence[Place] = ()) -> tuple[Place, ...]:
    """The places of all ranks in `timeline`, in the order of rank.

    A rank that `known` lacks takes its stage from its actions, and its replica from the order of the ranks
    that share the stage.
    """
    by_rank = {place.rank: place for place in known}
    counts: dict[int, int] = {}
    places = []
    for rank, stage in sorted({row.rank: row.action.stage for row in timeline.rows}.items()):
        replica = counts.get(stage, 0)
        counts[stage] = replica + 1
        places.append(by_rank.get(rank, Place(rank, stage, replica)))
    return tuple(places)
