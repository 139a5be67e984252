"""The chip's numbers, read from a TOML file in which every value names its source and its confidence."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path

from ratrain.errors import UserError

CHIPS = Path(__file__).parent / "chips"
SECTIONS = ("cluster", "memory", "dma", "core", "kernel")
DTYPE_BYTES = {"fp16": 2, "fp32": 4, "fp64": 8, "i64": 8}
ACCUMULATOR = {"fp16": "fp32", "fp32": "fp32", "fp64": "fp64"}
MAY_BE_ZERO = {
    "launch_seconds",
    "barrier_cycles",
    "gsm_latency_cycles",
    "ddr_latency_seconds",
    "issue_cycles",
}


@dataclass(frozen=True)
class Chip:
    """One compute cluster. Field names are the keys of the TOML file; units are in the names.

    `lanes_*` are multiply-adds per vector instruction; FP16 counts FP16 inputs with FP32 accumulation.
    """

    name: str
    title: str
    cores: int
    clock_hz: float
    barrier_cycles: int
    launch_seconds: float
    ddr_bytes: int
    gsm_bytes: int
    am_bytes: int
    sm_bytes: int
    alignment_bytes: int
    ddr_bytes_per_second: float
    gsm_bytes_per_cycle: float
    core_bytes_per_cycle: float
    ddr_latency_seconds: float
    gsm_latency_cycles: int
    issue_cycles: int
    channels: int
    vector_bytes: int
    fma_units: int
    lanes_fp64: int
    lanes_fp32: int
    lanes_fp16: int
    am_load_bytes_per_cycle: int
    am_store_bytes_per_cycle: int
    broadcast_bytes_per_cycle: int
    rows: int
    max_vectors: int
    start_cycles: int
    lane_sum_cycles: float
    transpose_cycles_per_vector: float
    nt_in_am: bool
    efficiency: float

    def lanes(self, dtype: str) -> int:
        return {"fp64": self.lanes_fp64, "fp32": self.lanes_fp32, "fp16": self.lanes_fp16}[dtype]

    def flops_per_cycle(self, dtype: str) -> int:
        """Peak of one core, multiply and add counted apart."""
        return 2 * self.fma_units * self.lanes(dtype)

    def peak(self, dtype: str, cores: int | None = None) -> float:
        """FLOP/s of `cores` cores (default: the cluster)."""
        return self.flops_per_cycle(dtype) * self.clock_hz * (cores or self.cores)

    def capacity(self, level: str) -> int:
        """Bytes of one DDR, GSM (per cluster), AM or SM (per core)."""
        return {"ddr": self.ddr_bytes, "gsm": self.gsm_bytes, "am": self.am_bytes, "sm": self.sm_bytes}[level]

    @cached_property
    def ddr_bytes_per_cycle(self) -> float:
        return self.ddr_bytes_per_second / self.clock_hz

    @cached_property
    def ddr_latency_cycles(self) -> int:
        return round(self.ddr_latency_seconds * self.clock_hz)

    def aligned(self, size: int) -> int:
        """`size` bytes rounded up to the alignment of an allocation."""
        return -(-size // self.alignment_bytes) * self.alignment_bytes

    def with_ddr(self, bytes_per_second: float) -> Chip:
        """The same chip at another DDR rate, for sensitivity."""
        return replace(self, ddr_bytes_per_second=bytes_per_second)


@cache
def load_chip(name: str = "mt3000") -> Chip:
    """Read a chip by name (a file of chips/) or by path. UserError names the key that is wrong."""
    path = CHIPS / f"{name}.toml" if not name.endswith(".toml") else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CHIPS.glob("*.toml")))
        raise UserError(
            f"chip {name!r}: no such chip or file; give one of {known}, or the path of a .toml file"
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UserError(
            f"{path}: not a TOML file ({problem}); copy one of the shipped chips and edit it"
        ) from None
    found: dict[str, object] = {"name": data.get("name", path.stem), "title": data.get("title", path.stem)}
    for section in SECTIONS:
        entries = data.get(section, {})
        if not isinstance(entries, dict):
            raise UserError(f"{path}: [{section}] must be a table of values; copy it from a shipped chip")
        for key, entry in entries.items():
            value = entry.get("value") if isinstance(entry, dict) else entry
            if isinstance(value, bool) == (key != "nt_in_am") or not isinstance(value, int | float):
                raise UserError(
                    f"{path}: {section}.{key} is {value!r}; expected a number, as {{ value = ..., source = ... }}"
                )
            if value < 0 or (value == 0 and key not in MAY_BE_ZERO and key != "nt_in_am"):
                raise UserError(f"{path}: {section}.{key} is {value}; it must be greater than 0")
            found[key] = value
    wanted = {field.name for field in fields(Chip)}
    for key in sorted(wanted - found.keys()):
        raise UserError(f"{path}: {key} is missing; copy it from a shipped chip and set its value")
    for key in sorted(found.keys() - wanted):
        raise UserError(f"{path}: {key} is not a chip parameter; remove it or mend its spelling")
    return Chip(**found)  # type: ignore[arg-type]
