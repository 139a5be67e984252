"""The tile schedule: the one description of an operator that the executor runs and the cost model prices.

A schedule is a tree of statements over named *dimensions*. Every statement stands in an environment that maps
each dimension to the `range` of indices it currently covers; loops and splits narrow those ranges on the way
down. A buffer or operand is indexed by dimension names, so a transfer needs no addresses: it moves the region
that the environment names. All cores run the same tree (SPMD); only `Split` looks at the core's number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from ratrain.machine.mt3000.chip import DTYPE_BYTES, Chip

Env = dict[str, range]
LEGAL_PATHS = {
    ("ddr", "gsm"),
    ("gsm", "ddr"),
    ("ddr", "am"),
    ("am", "ddr"),
    ("gsm", "am"),
    ("am", "gsm"),
    ("gsm", "sm"),
}


@dataclass(frozen=True)
class Operand:
    """An array in DDR, indexed by `dims` in storage order."""

    name: str
    dims: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Buffer:
    """Scratchpad memory for a region of `shape` (per slot) over `dims`; `copies` slots used in turn.

    In GSM one instance serves `group` consecutive cores; AM and SM buffers are private to a core.
    """

    name: str
    level: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    copies: int = 1
    group: int = 1

    @property
    def slot_bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class When:
    """True where `dim` stands at the start (`first`) or the end (`last`) of its whole extent, or where its keys
    begin `before` the keys that are level with the first query of dimension `than`; `not_` inverts."""

    dim: str
    end: str
    not_: bool = False
    than: str = ""

    def __str__(self) -> str:
        return f"if {self.dim} is {'not ' if self.not_ else ''}{self.end}{' ' * bool(self.than)}{self.than}"


@dataclass(frozen=True)
class Dma:
    """Move the environment's region from `src` to `dst` and go on; a `Wait` on the same tag ends it.

    `ahead`: issued one iteration of the enclosing loop early (the first one before the loop starts), into the
    next slot. `broadcast`: so many cores receive one DDR read.
    """

    src: str
    dst: str
    ahead: bool = False
    broadcast: int = 1
    when: tuple[When, ...] = ()

    @property
    def tag(self) -> str:
        return f"{self.src}>{self.dst}"


@dataclass(frozen=True)
class Wait:
    """Block until at most `keep` transfers of this tag are under way."""

    tag: str
    keep: int = 0
    when: tuple[When, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """Compute on scratchpad regions. `args` maps the kernel's roles to buffers, `dims` to dimensions."""

    name: str
    args: tuple[tuple[str, str], ...]
    dims: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[str, float], ...] = ()
    when: tuple[When, ...] = ()


@dataclass(frozen=True)
class Barrier:
    """All cores of the cluster meet."""


@dataclass(frozen=True, eq=False)
class Loop:
    """Run `body` over tiles of `dim`. `rotates` names the buffers that take their next slot each iteration.

    `until=q`: causal, only tiles that some index of dimension q may attend to. `chained`: transfers issued
    ahead run on into the first tile of the parent loop's next iteration, so the pipeline does not drain between.
    `keeps` names buffers that hold the loop's region and keep their contents when the region comes again.
    """

    dim: str
    tile: int
    body: tuple[Statement, ...]
    rotates: tuple[str, ...] = ()
    until: str | None = None
    chained: bool = False
    keeps: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Split:
    """Narrow `dim` to this core's share: part `(core // stride) % ways` of `ways`.

    Contiguous parts are multiples of `unit`; `strided` deals single indices out in turn (balances causal work).
    """

    dim: str
    ways: int
    body: tuple[Statement, ...]
    stride: int = 1
    unit: int = 1
    strided: bool = False


@dataclass(frozen=True, eq=False)
class Causal:
    """Drop the query rows of `dim` that may not attend to the first index of `key`, whole vectors at a time."""

    dim: str
    key: str
    lanes: int
    body: tuple[Statement, ...]


@dataclass(frozen=True, eq=False)
class Pick:
    """Set `dim` to the one row that the index operand `ids` holds for the current index of `by`."""

    dim: str
    ids: str
    by: str
    body: tuple[Statement, ...]


Statement = Dma | Wait | Kernel | Barrier | Loop | Split | Causal | Pick
Scope = Loop | Split | Causal | Pick


@dataclass(frozen=True, eq=False)
class Schedule:
    """A whole operator. `extents`: full length of every dimension. `offset`: keys before the first query."""

    name: str
    cores: int
    extents: dict[str, int]
    operands: tuple[Operand, ...]
    buffers: tuple[Buffer, ...]
    body: tuple[Statement, ...]
    flops: int
    dtype: str
    tiles: dict[str, int] = field(default_factory=dict)
    offset: int = 0

    @cached_property
    def places(self) -> dict[str, Operand | Buffer]:
        places: tuple[Operand | Buffer, ...] = (*self.operands, *self.buffers)
        return {place.name: place for place in places}

    def level(self, name: str) -> str:
        place = self.places[name]
        return place.level if isinstance(place, Buffer) else "ddr"

    def env(self) -> Env:
        return {dim: range(extent) for dim, extent in self.extents.items()}

    def footprint(self, chip: Chip) -> dict[str, int]:
        """Bytes needed per level: the cluster's GSM, one core's AM and SM."""
        need = {"gsm": 0, "am": 0, "sm": 0}
        for buffer in self.buffers:
            instances = -(-self.cores // buffer.group) if buffer.level == "gsm" else 1
            need[buffer.level] += chip.aligned(buffer.slot_bytes) * buffer.copies * instances
        return need

    def fits(self, chip: Chip) -> bool:
        return all(need <= chip.capacity(level) for level, need in self.footprint(chip).items())

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(frozen=True)
class Frame:
    """Where a reader stands: the ranges of this iteration, of the enclosing loop's next one (None at its end),
    and whether chained loops inside find their first tile already on its way."""

    env: Env
    after: Env | None
    primed: bool

    def narrowed(self, node: Split | Causal | Pick, core: int, schedule: Schedule) -> Frame:
        after = None if self.after is None else narrow(node, self.after, core, schedule)
        return Frame(narrow(node, self.env, core, schedule), after, self.primed)


def loop_tiles(loop: Loop, env: Env, schedule: Schedule) -> list[Env]:
    """The environment of each iteration of `loop`."""
    whole = env[loop.dim]
    if loop.until is not None:
        queries = env[loop.until]
        reach = queries[-1] + schedule.offset + 1 if queries else whole.start
        tiles = ceil(max(0, reach - whole.start) / whole.step / loop.tile)
        whole = whole[: tiles * loop.tile]
    return [{**env, loop.dim: whole[i : i + loop.tile]} for i in range(0, len(whole), loop.tile)]


def loop_frames(loop: Loop, frame: Frame, schedule: Schedule) -> list[Frame]:
    """The frame of each iteration of `loop`."""
    tiles = loop_tiles(loop, frame.env, schedule)
    follow = None
    if loop.chained and frame.after is not None:
        follow = next(iter(loop_tiles(loop, frame.after, schedule)), None)
    primed = loop.chained and frame.primed
    return [
        Frame(env, tiles[index + 1] if index + 1 < len(tiles) else follow, primed or index > 0)
        for index, env in enumerate(tiles)
    ]


def narrow(node: Split | Causal | Pick, env: Env, core: int, schedule: Schedule) -> Env:
    """The environment inside a node that narrows a range without looping. A picked row is some row."""
    covered = env[node.dim]
    match node:
        case Split():
            part = (core // node.stride) % node.ways
            if node.strided:
                return {**env, node.dim: covered[part :: node.ways]}
            share = ceil(ceil(len(covered) / node.ways) / node.unit) * node.unit
            return {**env, node.dim: covered[part * share : (part + 1) * share]}
        case Causal():
            keys = env[node.key]
            if not keys or not covered:
                return {**env, node.dim: covered[:0]}
            blocked = max(0, -(-(keys[0] - schedule.offset - covered.start) // covered.step))
            start = blocked // node.lanes * node.lanes if blocked < len(covered) else len(covered)
            return {**env, node.dim: covered[start:]}
        case Pick():
            return {**env, node.dim: range(1) if env[node.by] else range(0)}


def holds(conditions: tuple[When, ...], env: Env, schedule: Schedule) -> bool:
    """Whether a statement with these conditions runs."""
    for condition in conditions:
        covered = env[condition.dim]
        if not covered:
            return False
        if condition.end == "before":
            true = covered[0] < env[condition.than].start + schedule.offset
        elif condition.end == "first":
            true = covered[0] == 0
        else:
            true = covered[-1] == schedule.extents[condition.dim] - 1
        if true == condition.not_:
            return False
    return True


def walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement below `body`, outer ones first."""
    for statement in body:
        yield statement
        if isinstance(statement, Scope):
            yield from walk(statement.body)


def _lines(schedule: Schedule) -> Iterator[str]:
    yield f"schedule {schedule.name} on {schedule.cores} cores, {schedule.extents}"
    for operand in schedule.operands:
        yield f"  ddr {operand.name}[{', '.join(operand.dims)}] {operand.dtype}"
    for buffer in schedule.buffers:
        shape = " x ".join(map(str, buffer.shape))
        shared = f", one per {buffer.group} cores" if buffer.level == "gsm" else ""
        yield (
            f"  {buffer.level} {buffer.name}[{', '.join(buffer.dims)}] {shape} {buffer.dtype}"
            f" x{buffer.copies} = {buffer.slot_bytes * buffer.copies} B{shared}"
        )
    yield from _body_lines(schedule.body, "  ")


def _body_lines(body: tuple[Statement, ...], indent: str) -> Iterator[str]:
    for statement in body:
        when = "".join(f" {condition}" for condition in getattr(statement, "when", ()))
        match statement:
            case Dma():
                how = f" broadcast to {statement.broadcast}" if statement.broadcast > 1 else ""
                how += " (ahead)" if statement.ahead else ""
                yield f"{indent}dma {statement.src} -> {statement.dst}{how}{when}"
            case Wait():
                keep = f" until {statement.keep} left" if statement.keep else ""
                yield f"{indent}wait {statement.tag}{keep}{when}"
            case Kernel():
                args = ", ".join(f"{role}={name}" for role, name in (*statement.args, *statement.dims))
                yield f"{indent}{statement.name}({args}){when}"
            case Barrier():
                yield f"{indent}barrier"
            case Loop():
                rotates = f" rotating {', '.join(statement.rotates)}" if statement.rotates else ""
                until = f" until {statement.until}" if statement.until else ""
                chained = " chained" if statement.chained else ""
                keeps = f" keeping {', '.join(statement.keeps)}" if statement.keeps else ""
                yield f"{indent}for {statement.dim} by {statement.tile}{until}{chained}{rotates}{keeps}:"
            case Split():
                how = "strided" if statement.strided else f"unit {statement.unit}"
                yield f"{indent}split {statement.dim} {statement.ways} ways over cores ({how}):"
            case Causal():
                yield f"{indent}only {statement.dim} that see {statement.key}:"
            case Pick():
                yield f"{indent}{statement.dim} = {statement.ids}[{statement.by}]:"
        if isinstance(statement, Scope):
            yield from _body_lines(statement.body, indent + "  ")
