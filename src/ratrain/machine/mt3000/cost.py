"""The cost model: reads a schedule without data and says what it moves and how long it takes.

It walks the same tree as the executor with the same timing rules, but remembers: an iteration that starts from
a relative state of clock and transfers already seen, over ranges of the same lengths, takes as long as before.
Tile loops are periodic, so a schedule of millions of micro-kernels is priced in a few thousand steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ratrain.machine.mt3000.chip import DTYPE_BYTES, Chip
from ratrain.machine.mt3000.clock import Busy, CoreClock, Rates, State
from ratrain.machine.mt3000.kernels import kernel_cycles
from ratrain.machine.mt3000.schedule import (
    Barrier,
    Causal,
    Dma,
    Env,
    Frame,
    Kernel,
    Loop,
    Pick,
    Schedule,
    Scope,
    Split,
    Statement,
    Wait,
    holds,
    loop_frames,
    loop_tiles,
    narrow,
    walk,
)

PATHS = ("ddr>gsm", "gsm>ddr", "ddr>am", "am>ddr", "gsm>am", "am>gsm", "gsm>sm")


@dataclass(frozen=True)
class Cost:
    """What one run of a schedule costs: cycles of the most loaded core, bytes per path over the cluster."""

    schedule: Schedule
    chip: Chip
    cores: int
    cycles: int
    compute_cycles: int
    issue_cycles: int
    ddr_cycles: int
    gsm_cycles: int

    @cached_property
    def traffic(self) -> tuple[int, ...]:
        """Bytes per path of PATHS and, last, transfers; counted when first asked for."""
        return _Reader(self.schedule, self.chip).cluster_traffic()

    @property
    def bytes(self) -> dict[str, int]:
        return {path: size for path, size in zip(PATHS, self.traffic) if size}

    @property
    def transfers(self) -> int:
        return self.traffic[-1]

    @property
    def seconds(self) -> float:
        """Including the kernel's launch."""
        return self.cycles / self.chip.clock_hz + self.chip.launch_seconds

    @property
    def ddr_bytes(self) -> int:
        return sum(size for path, size in self.bytes.items() if "ddr" in path)

    @property
    def flops_per_second(self) -> float:
        return self.schedule.flops / self.seconds

    @property
    def percent_of_peak(self) -> float:
        return 100 * self.flops_per_second / self.chip.peak(self.schedule.dtype, self.cores)

    @property
    def bound(self) -> str:
        """What keeps the busiest core: compute, DDR, GSM or issue (transfers' issue, barriers and launch)."""
        launch = round(self.chip.launch_seconds * self.chip.clock_hz)
        parts = {
            "compute": self.compute_cycles,
            "DDR": self.ddr_cycles,
            "GSM": self.gsm_cycles,
            "issue": self.issue_cycles + launch,
        }
        return max(parts, key=lambda name: parts[name])


def price(schedule: Schedule, chip: Chip, cores: int | None = None) -> Cost:
    """Traffic and time of `schedule` on `chip`; `cores` (default: all) is what its rate is compared with."""
    reader = _Reader(schedule, chip)
    clock = CoreClock(Rates(chip, schedule.cores))
    reader.time(schedule.body, Frame(schedule.env(), None, False), clock, 0)
    return Cost(
        schedule=schedule,
        chip=chip,
        cores=cores or chip.cores,
        cycles=clock.now,
        compute_cycles=clock.compute,
        issue_cycles=clock.issue,
        ddr_cycles=clock.ddr,
        gsm_cycles=clock.gsm,
    )


class _Reader:
    def __init__(self, schedule: Schedule, chip: Chip) -> None:
        self.schedule = schedule
        self.chip = chip
        self.times: dict[object, tuple[int, State, Busy]] = {}
        self.counts: dict[object, tuple[int, ...]] = {}
        self.compute: dict[object, int] = {}
        self.paths: dict[Dma, tuple[int, bool, tuple[str, ...], int]] = {}
        self.splits: dict[Loop, bool] = {}
        self.relevant: dict[Loop, tuple[tuple[str, str], ...]] = {}

    def relevance(self, loop: Loop) -> tuple[tuple[str, str], ...]:
        """The dimensions that matter to one iteration of `loop`, and what of each: its whole range where causality
        depends on position, its length and ends where a condition asks for them, or its length alone."""
        if loop not in self.relevant:
            used, ended, placed = set(), set(), set()
            for statement in walk(loop.body):
                for condition in getattr(statement, "when", ()):
                    if condition.than:
                        placed |= {condition.dim, condition.than}
                    else:
                        ended.add(condition.dim)
                match statement:
                    case Dma():
                        used |= set(self.transfer(statement)[2])
                    case Kernel():
                        used |= {dim for _, name in statement.args for dim in self.schedule.places[name].dims}
                    case Loop():
                        used.add(statement.dim)
                        placed |= {statement.dim, statement.until} if statement.until else set()
                    case Causal():
                        placed |= {statement.dim, statement.key}
                    case Split() | Pick():
                        used.add(statement.dim)
            kinds = (
                {dim: "length" for dim in used}
                | dict.fromkeys(ended, "ends")
                | dict.fromkeys(placed, "range")
            )
            self.relevant[loop] = tuple((dim, kinds[dim]) for dim in self.schedule.extents if dim in kinds)
        return self.relevant[loop]

    def signature(self, loop: Loop, env: Env | None) -> tuple[object, ...]:
        if env is None:
            return ()
        parts: list[object] = []
        for dim, kind in self.relevance(loop):
            covered = env[dim]
            if kind == "range":
                parts.append(covered)
            elif kind == "ends" and covered:
                parts.append((len(covered), covered[0] == 0, covered[-1] == self.schedule.extents[dim] - 1))
            else:
                parts.append(len(covered))
        return tuple(parts)

    def transfer(self, dma: Dma) -> tuple[int, bool, tuple[str, ...], int]:
        """(path index, touches DDR, dimensions moved, bytes per element)"""
        if dma not in self.paths:
            source, target = self.schedule.level(dma.src), self.schedule.level(dma.dst)
            place = self.schedule.places[dma.dst if source == "ddr" else dma.src]
            self.paths[dma] = (
                PATHS.index(f"{source}>{target}"),
                "ddr" in (source, target),
                place.dims,
                DTYPE_BYTES[place.dtype],
            )
        return self.paths[dma]

    def time(self, body: tuple[Statement, ...], frame: Frame, clock: CoreClock, core: int) -> None:
        for statement in body:
            match statement:
                case Dma():
                    here = frame.after if statement.ahead else frame.env
                    if here is not None:
                        self.issue(statement, here, clock)
                case Wait():
                    if holds(statement.when, frame.env, self.schedule):
                        clock.wait(statement.tag, statement.keep)
                case Kernel():
                    if holds(statement.when, frame.env, self.schedule):
                        clock.run(self.cycles(statement, frame.env))
                case Barrier():
                    clock.barrier()
                case Loop():
                    self.time_loop(statement, frame, clock, core)
                case _:
                    self.time(statement.body, frame.narrowed(statement, core, self.schedule), clock, core)

    def time_loop(self, loop: Loop, frame: Frame, clock: CoreClock, core: int) -> None:
        frames = loop_frames(loop, frame, self.schedule)
        if frames and not (loop.chained and frame.primed):
            self.prologue(loop.body, frames[0].env, clock, core)
        for inner in frames:
            key = (
                id(loop),
                self.signature(loop, inner.env),
                self.signature(loop, inner.after),
                inner.primed,
                clock.state(),
            )
            known = self.times.get(key)
            if known is None:
                start, busy = clock.now, clock.busy()
                self.time(loop.body, inner, clock, core)
                gained = clock.busy()
                used = (gained[0] - busy[0], gained[1] - busy[1], gained[2] - busy[2], gained[3] - busy[3])
                self.times[key] = (clock.now - start, clock.state(), used)
            else:
                clock.leap(*known)

    def prologue(self, body: tuple[Statement, ...], env: Env, clock: CoreClock, core: int) -> None:
        for statement in body:
            if isinstance(statement, Dma):
                if statement.ahead:
                    self.issue(statement, env, clock)
            elif isinstance(statement, Scope) and not isinstance(statement, Loop):
                self.prologue(statement.body, narrow(statement, env, core, self.schedule), clock, core)

    def issue(self, dma: Dma, env: Env, clock: CoreClock) -> None:
        if not holds(dma.when, env, self.schedule):
            return
        _, ddr, dims, size = self.transfer(dma)
        for dim in dims:
            size *= len(env[dim])
        if size:
            clock.start(dma.tag, ddr, size, dma.broadcast)

    def cycles(self, kernel: Kernel, env: Env) -> int:
        key = (kernel, tuple(map(len, env.values())))
        if key not in self.compute:
            self.compute[key] = kernel_cycles(self.chip, self.schedule, kernel, env)
        return self.compute[key]

    def cluster_traffic(self) -> tuple[int, ...]:
        per_core = [
            self.count(self.schedule.body, self.schedule.env(), core) for core in range(self.schedule.cores)
        ]
        return tuple(map(sum, zip(*per_core)))

    def count(self, body: tuple[Statement, ...], env: Env, core: int) -> tuple[int, ...]:
        totals = [0] * (len(PATHS) + 1)
        for statement in body:
            if isinstance(statement, Dma):
                if statement.broadcast > 1 and core >= self.schedule.cores // statement.broadcast:
                    continue
                if not holds(statement.when, env, self.schedule):
                    continue
                path, _, dims, size = self.transfer(statement)
                for dim in dims:
                    size *= len(env[dim])
                if size:
                    totals[path] += size
                    totals[-1] += 1
            elif isinstance(statement, Loop):
                for here in loop_tiles(statement, env, self.schedule):
                    for index, amount in enumerate(self.count_tile(statement, here, core)):
                        totals[index] += amount
            elif isinstance(statement, Scope):
                inner = narrow(statement, env, core, self.schedule)
                for index, amount in enumerate(self.count(statement.body, inner, core)):
                    totals[index] += amount
        return tuple(totals)

    def count_tile(self, loop: Loop, env: Env, core: int) -> tuple[int, ...]:
        if loop not in self.splits:
            self.splits[loop] = any(
                isinstance(s, Split) or (isinstance(s, Dma) and s.broadcast > 1) for s in walk(loop.body)
            )
        key = (id(loop), self.signature(loop, env), core if self.splits[loop] else -1)
        if key not in self.counts:
            self.counts[key] = self.count(loop.body, env, core)
        return self.counts[key]
