"""Layout: what a program is built for. Which blocks sit where, and the choices that shape the schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

RUNGS = ("keep", "elementwise", "mlp", "inputs")
"""The recovery ladder, from keeping every activation to keeping the block's input only."""

EMBED, HEAD, TIED = "embed", "head", "tied"


class Unit(NamedTuple):
    """A state unit on one stage: its name and the blocks there that read its view, in forward order."""

    name: str
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """A training layout.

    stages        blocks of each stage in forward order; together embed, layer0.., head, each exactly once
    replicas      data-parallel degree D
    microbatches  micro-batches M of one replica in one step
    zero          ZeRO level 0 to 3
    tied          embedding and head share one matrix, which is then a unit of its own
    rungs         recovery rung of each block, same shape as `stages`
    ahead         micro-batches besides the one in backward that may hold recovered blocks
    elide         a micro-batch whose backward directly follows its forward drops nothing
    gated         the update waits for the global gradient norm (clipping or a loss scale)
    tensor        tensor ranks that compute every block together, see `passes.forward_side_recovery`
    grouped       micro-batches whose forwards open a step, and whose backwards end it, block by block; as many as
                  there are where it is more. Some layouts refuse more than 1, see `ungroupable`
    """

    stages: tuple[tuple[str, ...], ...]
    replicas: int = 1
    microbatches: int = 1
    zero: int = 1
    tied: bool = False
    rungs: tuple[tuple[str, ...], ...] = ()
    ahead: int = 1
    elide: bool = True
    gated: bool = True
    grouped: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if not self.rungs:
            object.__setattr__(self, "rungs", tuple(tuple("keep" for _ in blocks) for blocks in self.stages))
        flat = [block for blocks in self.stages for block in blocks]
        layers = [f"layer{i}" for i in range(len(flat) - 2)]
        if flat != [EMBED, *layers, HEAD]:
            raise ValueError(f"stages must hold embed, layer0.., head in order, each once; got {flat}")
        if any(not blocks for blocks in self.stages):
            raise ValueError("a stage without any block")
        if [len(r) for r in self.rungs] != [len(b) for b in self.stages]:
            raise ValueError("rungs must name one rung per block")
        if any(rung not in RUNGS for rungs in self.rungs for rung in rungs):
            raise ValueError(f"a rung is one of {', '.join(RUNGS)}")
        if self.replicas < 1 or self.microbatches < 1 or self.zero not in (0, 1, 2, 3) or self.ahead < 0:
            raise ValueError("replicas and microbatches at least 1, zero 0..3, ahead at least 0")
        if self.grouped < 1:
            raise ValueError("grouped at least 1")
        if self.grouped > 1 and self.ungroupable:
            raise ValueError(f"grouped {self.grouped}: {self.ungroupable}; set it to 1")

    @classmethod
    def even(cls, pipeline: int, layers: int, **choices: object) -> Layout:
        """Even placement: the remainder goes to the first stages, so that none vanishes."""
        counts = [layers // pipeline + (s < layers % pipeline) for s in range(pipeline)]
        return cls(place(tuple(counts)), **choices)  # type: ignore[arg-type]

    @property
    def pipeline(self) -> int:
        """Number of stages P."""
        return len(self.stages)

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Decoder layers per stage."""
        return tuple(sum(b not in (EMBED, HEAD) for b in blocks) for blocks in self.stages)

    @cached_property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        """State units of each stage in the order in which forward first reads them.

        A tied matrix is one unit per stage that holds it: also of a single stage, which reads it twice.
        """
        table = []
        for blocks in self.stages:
            readers: dict[str, list[str]] = {}
            for block in blocks:
                for unit in self.reads(block):
                    readers.setdefault(unit, []).append(block)
            table.append(tuple(Unit(name, tuple(who)) for name, who in readers.items()))
        return tuple(table)

    def reads(self, block: str) -> tuple[str, ...]:
        """Names of the units whose views `block` reads."""
        if not self.tied or block not in (EMBED, HEAD):
            return (block,)
        return (TIED,) if block == EMBED else (TIED, HEAD)

    @property
    def tied_across(self) -> bool:
        """The tied matrix lives on two different stages."""
        return self.tied and self.pipeline > 1

    def rung(self, stage: int, block: str) -> str:
        """Recovery rung of `block`."""
        return self.rungs[stage][self.stages[stage].index(block)]

    @property
    def ungroupable(self) -> str | None:
        """Why no micro-batches may be grouped at the ends of a step; None if they may."""
        if self.zero >= 2 and self.replicas > 1:
            return f"ZeRO-{self.zero} reduces every micro-batch by itself, so there is nothing to gain"
        if self.tied and self.pipeline == 1:
            return "a matrix that one stage reads twice would be summed in another order"
        return None

    def warmup(self, stage: int, grouped: int = 1) -> int:
        """Forwards before the first backward: min(P-s-1, M) in 1F1B, and k-1 more where k micro-batches are
        grouped (`Program.grouped`)."""
        return min(self.pipeline - stage - 1 + grouped - 1, self.microbatches)

    def in_flight(self, stage: int, grouped: int = 1) -> int:
        """Micro-batches whose activations stage `stage` holds at once: min(P-s+k-1, M)."""
        return min(self.pipeline - stage + grouped - 1, self.microbatches)

    def with_(self, **changes: object) -> Layout:
        """A copy with some choices changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def place(counts: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """Blocks per stage from decoder layers per stage; embed joins the first stage and head the last.

    Raises ValueError if a middle stage would be empty.
    """
    stages = []
    start = 0
    for s, count in enumerate(counts):
        blocks = [f"layer{i}" for i in range(start, start + count)]
        start += count
        if s == 0:
            blocks.insert(0, EMBED)
        if s == len(counts) - 1:
            blocks.append(HEAD)
        if not blocks:
            raise ValueError(f"stage {s} holds no block: only the first and the last stage may have 0 layers")
        stages.append(tuple(blocks))
    return tuple(stages)
