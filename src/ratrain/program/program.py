"""Program: for every rank, an ordered list of actions per stream. The one description of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ratrain.program.action import Action, Kind, parse
from ratrain.program.layout import Layout

FORMS = ("first", "steady", "flush", "evaluate")
"""`first` has no deferred work before it, `steady` opens with the previous step's, `flush` is only that work,
`evaluate` is forward only."""

STREAMS = ("compute", "send_act", "recv_act", "send_grad", "recv_grad", "sync", "prefetch")
"""Order within a stream is fixed; streams run side by side. An action on `compute` blocks computation."""

Lane = Mapping[str, tuple[Action, ...]]
"""One rank's streams."""


@dataclass(frozen=True)
class Program:
    """The actions of one step.

    layout    what it was built for
    form      one of FORMS
    lanes     lanes[stage][replica] holds that rank's streams; replicas that do the same share one object
    passes    names of the passes applied, in order
    ahead     micro-batches besides the one in backward that may hold recovered blocks (0: none)
    floating  kinds that may be pulled forward when `compute` would otherwise wait
    deferred  updates of a step run inside the next one (lag 1)
    elided    (stage, micro-batch) pairs whose activations are all kept although a rung says otherwise
    grouped   micro-batches at either end of the step that a stage computes block by block (1: none)
    """

    layout: Layout
    form: str
    lanes: tuple[tuple[Lane, ...], ...]
    passes: tuple[str, ...] = ()
    ahead: int = 0
    floating: frozenset[Kind] = frozenset()
    deferred: bool = False
    elided: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    grouped: int = 1

    def lane(self, stage: int, replica: int = 0) -> Lane:
        """Streams of the rank at (stage, replica)."""
        return self.lanes[stage][replica]

    def distinct(self) -> Iterator[tuple[int, int, Lane]]:
        """(stage, replica, lane) for each lane that is not the very object of an earlier replica."""
        for stage, replicas in enumerate(self.lanes):
            seen: set[int] = set()
            for replica, lane in enumerate(replicas):
                if id(lane) not in seen:
                    seen.add(id(lane))
                    yield stage, replica, lane

    def size(self) -> int:
        """Number of actions over the distinct lanes."""
        return sum(len(actions) for _, _, lane in self.distinct() for actions in lane.values())

    def keeps(self, stage: int, block: str, microbatch: int) -> str:
        """The rung that really applies to `block` for `microbatch`."""
        if (stage, microbatch) in self.elided:
            return "keep"
        return self.layout.rung(stage, block)

    def map_lanes(self, transform: dict[int, Lane], **changes: object) -> Program:
        """The same program with the lane of each stage in `transform` replaced on all its replicas."""
        lanes = tuple(
            tuple(transform[s] for _ in replicas) if s in transform else replicas
            for s, replicas in enumerate(self.lanes)
        )
        return replace(self, lanes=lanes, **changes)  # type: ignore[arg-type]


def dump(program: Program) -> str:
    """A readable text of the program, one stream a line; golden files hold this."""
    lines = [f"form {program.form}", f"passes {','.join(program.passes) or 'none'}"]
    for stage, replica, lane in program.distinct():
        for stream in STREAMS:
            if lane.get(stream):
                text = " ".join(str(a) for a in lane[stream])
                lines.append(f"stage {stage} replica {replica} {stream}: {text}")
    return "\n".join(lines) + "\n"


def load_lanes(text: str) -> dict[tuple[int, int], dict[str, tuple[Action, ...]]]:
    """The lanes of a dumped program, keyed by (stage, replica)."""
    lanes: dict[tuple[int, int], dict[str, tuple[Action, ...]]] = {}
    for line in text.splitlines():
        head, _, rest = line.partition(": ")
        words = head.split()
        if words and words[0] == "stage":
            actions = tuple(parse(word) for word in rest.split())
            lanes.setdefault((int(words[1]), int(words[3])), {})[words[4]] = actions
    return lanes
