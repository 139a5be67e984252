"""Scratchpad memory as it is: fixed capacity, explicit allocation, poisoned until written.

A `Slot` is one region-sized piece of a buffer. It knows which region of the operator's index space it holds
and what is under way on it, so that every access can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ratrain.machine.mt3000.schedule import Buffer

NUMPY = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "i64": np.int64}
POISON = 0xFF  # every float whose bytes are all 0xFF is a NaN


class MemoryFault(Exception):
    """A schedule broke a rule of the memory hierarchy. Names the buffer, the bytes and the level."""


class Arena:
    """One memory of `capacity` bytes with first-fit allocation at multiples of `alignment`."""

    def __init__(self, level: str, capacity: int, alignment: int) -> None:
        self.level = level
        self.capacity = capacity
        self.alignment = alignment
        self.storage = np.empty(0, np.uint8)
        self.blocks: dict[str, tuple[int, int]] = {}
        self.peak = 0

    def allocate(self, name: str, size: int) -> np.ndarray:
        """`size` poisoned bytes. MemoryFault when no gap is large enough or the name is taken."""
        if name in self.blocks:
            raise MemoryFault(f"{name}: already allocated in {self.level}; free it first")
        rounded = -(-size // self.alignment) * self.alignment
        start = 0
        for offset, length in sorted(self.blocks.values()):
            if offset - start >= rounded:
                break
            start = offset + length
        if start + rounded > self.capacity:
            held = sum(length for _, length in self.blocks.values())
            raise MemoryFault(
                f"{name}: overflow, {rounded} bytes do not fit {self.level} ({held} of {self.capacity} bytes held)"
            )
        if not len(self.storage):
            self.storage = np.empty(self.capacity, np.uint8)
        self.blocks[name] = (start, rounded)
        self.peak = max(self.peak, max(offset + length for offset, length in self.blocks.values()))
        block = self.storage[start : start + size]
        block.fill(POISON)
        return block

    def free(self, name: str) -> None:
        if name not in self.blocks:
            raise MemoryFault(f"{name}: not allocated in {self.level}")
        del self.blocks[name]

    def close(self) -> None:
        """MemoryFault if anything is still allocated."""
        if self.blocks:
            leaked = ", ".join(
                f"{name} ({length} bytes)" for name, (_, length) in sorted(self.blocks.items())
            )
            raise MemoryFault(f"{leaked}: leaked in {self.level}")


@dataclass
class Slot:
    """One copy of a buffer: its array, the region it holds, and the transfers under way on it."""

    buffer: Buffer
    array: np.ndarray
    origin: tuple[range, ...] = ()
    filled: bool = False
    arriving: int = 0
    leaving: int = 0
    used: int = -1  # the epoch (barriers passed) of the last read, or write by a kernel
    epoch: int = -1
    readers: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)

    def bind(self, region: tuple[range, ...]) -> None:
        """From now on hold `region`; the contents are poison until something fills them."""
        if region != self.origin or not self.arriving:
            self.origin = region
            self.filled = False

    def view(self, region: tuple[range, ...]) -> np.ndarray:
        """The part of the slot that holds `region`. MemoryFault if it is not inside."""
        index = []
        for wanted, held, room, dim in zip(region, self.origin, self.buffer.shape, self.buffer.dims):
            start = (wanted.start - held.start) // held.step
            step = wanted.step // held.step if len(wanted) > 1 else 1
            stop = start + (len(wanted) - 1) * step + 1
            if start < 0 or stop > len(held):
                raise MemoryFault(
                    f"{self.buffer.name}: {dim} {wanted} is outside the {held} that this slot in "
                    f"{self.buffer.level} holds"
                )
            if stop > room:
                size = self.buffer.slot_bytes
                raise MemoryFault(
                    f"{self.buffer.name}: overflow, {dim} needs {stop} of {room} places ({size} bytes in "
                    f"{self.buffer.level})"
                )
            index.append(slice(start, stop, step))
        return self.array[tuple(index)]

    def read_by(self, core: int, epoch: int) -> None:
        name, level, size = self.buffer.name, self.buffer.level, self.buffer.slot_bytes
        if self.arriving:
            raise MemoryFault(f"{name}: used before wait, {size} bytes still on their way into {level}")
        if not self.filled:
            raise MemoryFault(f"{name}: read before it was filled ({size} bytes in {level})")
        self.used = epoch
        if level == "gsm":
            self._meet(epoch)
            if self.writers - {core}:
                raise MemoryFault(
                    f"{name}: core {core} reads {size} bytes of {level} without a barrier after the write"
                )
            self.readers.add(core)

    def written_by(self, core: int, epoch: int, by_kernel: bool, broadcast: bool = False) -> None:
        name, level, size = self.buffer.name, self.buffer.level, self.buffer.slot_bytes
        if self.leaving:
            raise MemoryFault(f"{name}: overwritten while {size} bytes of {level} are still being stored")
        if self.arriving and (by_kernel or level != "gsm"):
            raise MemoryFault(f"{name}: overwritten while {size} bytes are still on their way into {level}")
        if broadcast and self.used == epoch:
            raise MemoryFault(
                f"{name}: broadcast over {size} bytes of {level} that a core may still use; a barrier is missing"
            )
        if by_kernel:
            self.used = epoch
        if level == "gsm":
            self._meet(epoch)
            if self.readers - {core}:
                raise MemoryFault(
                    f"{name}: core {core} overwrites {size} bytes of {level} that others still read"
                )
            self.writers.add(core)
        self.filled = True

    def _meet(self, epoch: int) -> None:
        if self.epoch != epoch:
            self.epoch = epoch
            self.readers.clear()
            self.writers.clear()
