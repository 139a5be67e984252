"""When things happen on one core: the timing rules of the chip, shared by the executor and the cost model.

A core issues a transfer (`issue_cycles`), goes on, and later waits for it. Each core has two transfer servers,
its share of DDR and its GSM port; a server works through its transfers in order, and latency is paid per
transfer but does not occupy the server. All times are whole cycles, so that equal states compare equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ratrain.machine.mt3000.chip import Chip

State = tuple[int, int, tuple[tuple[str, tuple[int, ...]], ...]]
Busy = tuple[int, int, int, int]


@dataclass(frozen=True)
class Rates:
    """Cycles of one transfer on a chip of which `cores` cores are at work and share DDR evenly."""

    chip: Chip
    cores: int

    def ddr_cycles(self, size: int, broadcast: int) -> int:
        """`size` bytes into each receiver; `broadcast` receivers are served by one read of DDR."""
        shared = size * self.cores / broadcast / self.chip.ddr_bytes_per_cycle
        return -int(-max(shared, size / self.chip.core_bytes_per_cycle) // 1)

    def gsm_cycles(self, size: int) -> int:
        return -int(-size / self.chip.gsm_bytes_per_cycle // 1)


@dataclass
class CoreClock:
    """One core's time, its servers, and the completion times of its transfers under way, oldest first."""

    rates: Rates
    now: int = 0
    ddr_free: int = 0
    gsm_free: int = 0
    pending: dict[str, list[int]] = field(default_factory=dict)
    compute: int = 0
    issue: int = 0
    ddr: int = 0
    gsm: int = 0

    def start(self, tag: str, ddr: bool, size: int, broadcast: int) -> None:
        """Issue a transfer of `size` bytes over DDR or within the chip."""
        chip = self.rates.chip
        self.now += chip.issue_cycles
        self.issue += chip.issue_cycles
        if ddr:
            duration = self.rates.ddr_cycles(size, broadcast)
            self.ddr_free = max(self.now, self.ddr_free) + duration
            self.ddr += duration
            done = self.ddr_free + chip.ddr_latency_cycles
        else:
            duration = self.rates.gsm_cycles(size)
            self.gsm_free = max(self.now, self.gsm_free) + duration
            self.gsm += duration
            done = self.gsm_free + chip.gsm_latency_cycles
        self.pending.setdefault(tag, []).append(done)

    def wait(self, tag: str, keep: int) -> None:
        waiting = self.pending.get(tag)
        while waiting and len(waiting) > keep:
            self.now = max(self.now, waiting.pop(0))

    def run(self, cycles: int) -> None:
        self.now += cycles
        self.compute += cycles

    def barrier(self) -> None:
        self.now += self.rates.chip.barrier_cycles
        self.issue += self.rates.chip.barrier_cycles

    def state(self) -> State:
        """Everything that decides the future, relative to now."""
        now = self.now
        waiting = []
        for tag, done in self.pending.items():
            if done:
                waiting.append((tag, tuple([t - now if t > now else 0 for t in done])))
        return (max(0, self.ddr_free - now), max(0, self.gsm_free - now), tuple(waiting))

    def busy(self) -> Busy:
        return (self.compute, self.issue, self.ddr, self.gsm)

    def leap(self, cycles: int, state: State, busy: Busy) -> None:
        """Advance to a remembered state."""
        self.now += cycles
        self.ddr_free = self.now + state[0]
        self.gsm_free = self.now + state[1]
        self.pending = {tag: [self.now + t for t in done] for tag, done in state[2]}
        self.compute += busy[0]
        self.issue += busy[1]
        self.ddr += busy[2]
        self.gsm += busy[3]
