"""What a row gave, as a file: so that a set can be gone on with, and tables be made later."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from race.arena import Record
from race.rows import Row


@dataclass(frozen=True)
class Result:
    """Records of one row by contender, what was run (fingerprint, repeat), and on what.

    overhead  of each RATrain: program and executor as a share of the last window, worst rank
    """

    row: str
    fingerprint: str
    repeat: int
    machine: dict[str, str]
    records: dict[str, Record] = field(default_factory=dict)
    overhead: dict[str, float] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes `<row>.json` into `folder`; details (timelines) are left out."""
        table = dataclasses.asdict(self)
        for record in table["records"].values():
            record.pop("details")
        aside = folder / f".{self.row}.json"
        aside.write_text(json.dumps(table, indent=1) + "\n")
        aside.replace(folder / f"{self.row}.json")


def load(folder: Path, row: Row) -> Result | None:
    """The saved result of `row` if it is of the row as it is now."""
    path = folder / f"{row.name}.json"
    if not path.exists():
        return None
    table = json.loads(path.read_text())
    if table["fingerprint"] != row.fingerprint:
        return None
    table["records"] = {name: Record(**record) for name, record in table["records"].items()}
    return Result(**table)


def machine() -> dict[str, str]:
    """Processor, cores and versions."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    packages = {name: _version(name) for name in ("torch", "transformers", "deepspeed")}
    return {"processor": model, "cores": str(len(os.sched_getaffinity(0))), **packages}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
