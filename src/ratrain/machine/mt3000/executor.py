"""The functional executor: runs a schedule on real arrays, inside memories of the chip's real sizes.

Cores run one after another between barriers. Data moves only by `Dma`, computes only on SM and AM, and every
access is checked: capacity, use before wait, overwriting what is in flight, reading what nobody wrote,
missing barriers in GSM, DDR read while a store to it is under way, transfers never waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ratrain.machine.mt3000.chip import Chip
from ratrain.machine.mt3000.clock import CoreClock, Rates
from ratrain.machine.mt3000.cost import PATHS
from ratrain.machine.mt3000.kernels import kernel_cycles
from ratrain.machine.mt3000.memory import NUMPY, Arena, MemoryFault, Slot
from ratrain.machine.mt3000.numerics import KERNELS, Call
from ratrain.machine.mt3000.schedule import (
    LEGAL_PATHS,
    Barrier,
    Buffer,
    Causal,
    Dma,
    Env,
    Frame,
    Kernel,
    Loop,
    Operand,
    Pick,
    Schedule,
    Scope,
    Split,
    Statement,
    Wait,
    holds,
    loop_frames,
    narrow,
    walk,
)

Region = tuple[range, ...]


@dataclass
class Counters:
    """What a run really did: bytes copied per path, transfers, cycles per core, peak bytes per level."""

    bytes: dict[str, int] = field(default_factory=dict)
    transfers: int = 0
    cycles: int = 0
    compute_cycles: list[int] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)


def execute(
    schedule: Schedule, chip: Chip, arrays: dict[str, np.ndarray], values: dict[str, float] | None = None
) -> Counters:
    """Run `schedule`; `arrays` maps each operand to an array in its dims' order and its dtype, results included.

    Operands missing from `arrays` (partial sums in DDR) are made and poisoned here. `values` are scalars handed to
    the kernels at run time, such as a learning rate.
    Raises MemoryFault where the schedule breaks a rule of the machine.
    """
    return _Executor(schedule, chip, arrays, values or {}).run()


@dataclass
class _Flight:
    """A transfer under way, and what it keeps busy."""

    source: Slot | None
    target: Slot | None
    stored: tuple[str, Region] | None


class _Executor:
    def __init__(
        self, schedule: Schedule, chip: Chip, arrays: dict[str, np.ndarray], values: dict[str, float]
    ) -> None:
        self.schedule = schedule
        self.values = values
        self.chip = chip
        self.counters = Counters(bytes=dict.fromkeys(PATHS, 0))
        self.arrays = self._operands(arrays)
        rates = Rates(chip, schedule.cores)
        self.clocks = [CoreClock(rates) for _ in range(schedule.cores)]
        self.flights: list[dict[str, list[_Flight]]] = [{} for _ in range(schedule.cores)]
        self.turns: list[dict[str, int]] = [
            {b.name: 0 for b in schedule.buffers} for _ in range(schedule.cores)
        ]
        self.slots: dict[tuple[str, int], list[Slot]] = {}
        self.arenas: list[Arena] = []
        self.epoch = 0
        # Only operands both read and written can be read too early.
        written = {s.dst for s in walk(schedule.body) if isinstance(s, Dma)}
        read = {s.src for s in walk(schedule.body) if isinstance(s, Dma)}
        self.hazardous = {operand.name for operand in schedule.operands} & written & read
        self.storing: list[tuple[str, Region]] = []
        self.meets: dict[Statement, bool] = {}

    def run(self) -> Counters:
        self._allocate()
        env = self.schedule.env()
        frames = [(core, Frame(env, None, False)) for core in range(self.schedule.cores)]
        self.together(self.schedule.body, frames)
        for core, flights in enumerate(self.flights):
            for tag, queue in flights.items():
                if queue:
                    raise MemoryFault(f"{tag}: leak, {len(queue)} transfers of core {core} never waited for")
        self._free()
        self.counters.cycles = max(clock.now for clock in self.clocks)
        self.counters.compute_cycles = [clock.compute for clock in self.clocks]
        self.counters.bytes = {path: size for path, size in self.counters.bytes.items() if size}
        return self.counters

    # Memory

    def _operands(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = {}
        for operand in self.schedule.operands:
            shape = tuple(self.schedule.extents[dim] for dim in operand.dims)
            array = arrays.get(operand.name)
            if array is None:
                array = np.empty(shape, NUMPY[operand.dtype])
                array.view(np.uint8).fill(0xFF)
            if array.shape != shape or array.dtype != NUMPY[operand.dtype]:
                raise MemoryFault(
                    f"{operand.name}: {array.shape} {array.dtype} in DDR; the schedule expects {shape} {operand.dtype}"
                )
            found[operand.name] = array
        return found

    def _allocate(self) -> None:
        chip, cores = self.chip, self.schedule.cores
        gsm = Arena("gsm", chip.gsm_bytes, chip.alignment_bytes)
        local = [
            {level: Arena(level, chip.capacity(level), chip.alignment_bytes) for level in ("am", "sm")}
            for _ in range(cores)
        ]
        for buffer in self.schedule.buffers:
            instances = -(-cores // buffer.group) if buffer.level == "gsm" else cores
            for instance in range(instances):
                arena = gsm if buffer.level == "gsm" else local[instance][buffer.level]
                slots = []
                for copy in range(buffer.copies):
                    block = arena.allocate(f"{buffer.name}.{instance}.{copy}", buffer.slot_bytes)
                    slots.append(Slot(buffer, block.view(NUMPY[buffer.dtype]).reshape(buffer.shape)))
                self.slots[buffer.name, instance] = slots
        self.arenas = [gsm, *(arena for core in local for arena in core.values())]
        for arena in self.arenas:
            self.counters.peak[arena.level] = max(self.counters.peak.get(arena.level, 0), arena.peak)

    def _free(self) -> None:
        for arena in self.arenas:
            for name in list(arena.blocks):
                arena.free(name)
            arena.close()

    def slot(self, core: int, name: str, ahead: int = 0) -> Slot:
        buffer = self.schedule.places[name]
        assert isinstance(buffer, Buffer)
        instance = core // buffer.group if buffer.level == "gsm" else core
        return self.slots[name, instance][(self.turns[core][name] + ahead) % buffer.copies]

    # Control

    def together(self, body: tuple[Statement, ...], frames: list[tuple[int, Frame]]) -> None:
        """Run `body` on all cores of `frames`; they meet at its barriers."""
        for statement in body:
            if not self.collective(statement):
                for core, frame in frames:
                    self.alone((statement,), frame, core)
            elif isinstance(statement, Barrier):
                self.epoch += 1
                now = max(self.clocks[core].now for core, _ in frames)
                for core, _ in frames:
                    self.clocks[core].now = now
                    self.clocks[core].barrier()
            elif isinstance(statement, Loop):
                rounds = [(core, self.enter(statement, frame, core)) for core, frame in frames]
                for index in range(max(len(inner) for _, inner in rounds)):
                    here = [(core, inner[index]) for core, inner in rounds if index < len(inner)]
                    for core, frame in here:
                        self.begin(statement, frame, core)
                    self.together(statement.body, here)
                    for core, _ in here:
                        self.turn(statement, core)
            elif isinstance(statement, Split):
                self.together(
                    statement.body,
                    [(core, frame.narrowed(statement, core, self.schedule)) for core, frame in frames],
                )
            else:
                raise MemoryFault("a barrier inside a causal or picked region would not be met by all cores")

    def alone(self, body: tuple[Statement, ...], frame: Frame, core: int) -> None:
        for statement in body:
            match statement:
                case Dma():
                    here = frame.after if statement.ahead else frame.env
                    if here is not None:
                        self.issue(statement, here, core, int(statement.ahead))
                case Wait():
                    if holds(statement.when, frame.env, self.schedule):
                        self.wait(statement, core)
                case Kernel():
                    if holds(statement.when, frame.env, self.schedule):
                        self.compute(statement, frame.env, core)
                case Loop():
                    for inner in self.enter(statement, frame, core):
                        self.begin(statement, inner, core)
                        self.alone(statement.body, inner, core)
                        self.turn(statement, core)
                case Pick():
                    self.alone(statement.body, Frame(self.picked(statement, frame.env), None, False), core)
                case Split() | Causal():
                    self.alone(statement.body, frame.narrowed(statement, core, self.schedule), core)

    def collective(self, statement: Statement) -> bool:
        if isinstance(statement, Barrier):
            return True
        if not isinstance(statement, Scope):
            return False
        if statement not in self.meets:
            self.meets[statement] = any(isinstance(inner, Barrier) for inner in walk(statement.body))
        return self.meets[statement]

    def enter(self, loop: Loop, frame: Frame, core: int) -> list[Frame]:
        frames = loop_frames(loop, frame, self.schedule)
        if frames and not (loop.chained and frame.primed):
            self.bind(loop, frames[0].env, core, 0)
            self.prologue(loop.body, frames[0].env, core)
        return frames

    def begin(self, loop: Loop, frame: Frame, core: int) -> None:
        for name in loop.keeps:
            slot = self.slot(core, name)
            region = tuple(frame.env[dim] for dim in slot.buffer.dims)
            if slot.origin != region:
                slot.bind(region)
        for name in loop.rotates:
            buffer = self.schedule.places[name]
            assert isinstance(buffer, Buffer)
            if buffer.copies == 1:
                self.slot(core, name).bind(tuple(frame.env[dim] for dim in buffer.dims))
            elif frame.after is not None:
                self.slot(core, name, 1).bind(tuple(frame.after[dim] for dim in buffer.dims))

    def turn(self, loop: Loop, core: int) -> None:
        for name in loop.rotates:
            self.turns[core][name] += 1

    def bind(self, loop: Loop, env: Env, core: int, ahead: int) -> None:
        for name in loop.rotates:
            place = self.schedule.places[name]
            self.slot(core, name, ahead).bind(tuple(env[dim] for dim in place.dims))

    def prologue(self, body: tuple[Statement, ...], env: Env, core: int) -> None:
        for statement in body:
            if isinstance(statement, Dma):
                if statement.ahead:
                    self.issue(statement, env, core, 0)
            elif isinstance(statement, Scope) and not isinstance(statement, Loop):
                self.prologue(statement.body, narrow(statement, env, core, self.schedule), core)

    def picked(self, node: Pick, env: Env) -> Env:
        if not env[node.by]:
            return {**env, node.dim: range(0)}
        row = int(self.arrays[node.ids][env[node.by][0]])
        return {**env, node.dim: range(row, row + 1)}

    # Transfers and kernels

    def issue(self, dma: Dma, env: Env, core: int, ahead: int) -> None:
        if not holds(dma.when, env, self.schedule):
            return
        path = (self.schedule.level(dma.src), self.schedule.level(dma.dst))
        if path not in LEGAL_PATHS:
            raise MemoryFault(f"{dma.tag}: no DMA path from {path[0]} to {path[1]}")
        place = self.schedule.places[dma.dst if path[0] == "ddr" else dma.src]
        region = tuple(env[dim] for dim in place.dims)
        if not all(region):
            return
        source, source_slot = self.end(dma.src, env, place.dims, core, 0)
        target, target_slot = self.end(dma.dst, env, place.dims, core, ahead)
        stored = None
        if path[0] == "ddr" and dma.src in self.hazardous:
            for name, taken in self.storing:
                if name == dma.src and all(_overlap(a, b) for a, b in zip(taken, region)):
                    raise MemoryFault(
                        f"{dma.src}: {source.nbytes} bytes of ddr read while a store to them is under way"
                    )
        if source_slot is not None:
            source_slot.read_by(core, self.epoch)
            source_slot.leaving += 1
        if target_slot is not None:
            target_slot.written_by(core, self.epoch, by_kernel=False, broadcast=dma.broadcast > 1)
            target_slot.arriving += 1
        elif dma.dst in self.hazardous:
            stored = (dma.dst, region)
            self.storing.append(stored)
        target[...] = source
        if dma.broadcast == 1 or core < self.schedule.cores // dma.broadcast:
            self.counters.bytes[f"{path[0]}>{path[1]}"] += target.nbytes
            self.counters.transfers += 1
        queue = self.flights[core].setdefault(dma.tag, [])
        queue.append(_Flight(source_slot, target_slot, stored))
        if sum(1 for flights in self.flights[core].values() if flights) > self.chip.channels:
            raise MemoryFault(f"{dma.tag}: more than {self.chip.channels} DMA channels in use on core {core}")
        self.clocks[core].start(dma.tag, "ddr" in path, target.nbytes, dma.broadcast)

    def end(
        self, name: str, env: Env, dims: tuple[str, ...], core: int, ahead: int
    ) -> tuple[np.ndarray, Slot | None]:
        """One end of a transfer: its array in the order of `dims`; other dimensions it has are of length 1 here."""
        place = self.schedule.places[name]
        slot = None
        if isinstance(place, Operand):
            array = self.arrays[name][tuple(_as_slice(env[dim]) for dim in place.dims)]
        else:
            slot = self.slot(core, name, ahead)
            array = slot.view(tuple(env[dim] for dim in place.dims))
        if place.dims == dims:
            return array, slot
        kept = [dim for dim in place.dims if dim in dims]
        if len(kept) < len(place.dims):
            array = array[tuple(slice(None) if dim in dims else 0 for dim in place.dims)]
        return array.transpose([kept.index(dim) for dim in dims]), slot

    def wait(self, wait: Wait, core: int) -> None:
        queue = self.flights[core].get(wait.tag, [])
        while len(queue) > wait.keep:
            flight = queue.pop(0)
            if flight.source is not None:
                flight.source.leaving -= 1
            if flight.target is not None:
                flight.target.arriving -= 1
            if flight.stored is not None:
                self.storing.remove(flight.stored)
        self.clocks[core].wait(wait.tag, wait.keep)

    def compute(self, kernel: Kernel, env: Env, core: int) -> None:
        numeric = KERNELS[kernel.name]
        views: dict[str, np.ndarray] = {}
        dims: dict[str, tuple[str, ...]] = {}
        for role, name in kernel.args:
            place = self.schedule.places[name]
            if self.schedule.level(name) not in ("am", "sm"):
                raise MemoryFault(
                    f"{name}: a kernel can compute in AM and SM only, not in {self.schedule.level(name)}"
                )
            region = tuple(env[dim] for dim in place.dims)
            if not all(region):
                return
            slot = self.slot(core, name)
            views[role] = slot.view(region)
            dims[role] = place.dims
            if role not in numeric.writes or role in numeric.updates:
                slot.read_by(core, self.epoch)
            if role in numeric.writes:
                slot.written_by(core, self.epoch, by_kernel=True)
        numeric.apply(
            Call(
                views,
                dims,
                dict(kernel.dims),
                {**dict(kernel.values), **self.values},
                env,
                self.schedule.offset,
            )
        )
        self.clocks[core].run(kernel_cycles(self.chip, self.schedule, kernel, env))


def _as_slice(covered: range) -> slice:
    return slice(covered.start, covered.stop, covered.step)


def _overlap(a: range, b: range) -> bool:
    """Whether two ranges can share an index (a bound: steps are ignored)."""
    return bool(a) and bool(b) and a[0] <= b[-1] and b[0] <= a[-1]
