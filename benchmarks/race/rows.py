"""The rows of the race, read from `rows.toml`: who runs against whom, on what, and what is asked of RATrain."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from race.workload import Model

ROWS = Path(__file__).with_name("rows.toml")
RATRAIN = "ratrain"


@dataclass(frozen=True)
class Case:
    """One contender in one row, complete.

    name            how tables call it
    tool            who runs it, a key of `contenders.TOOLS`
    pipeline, data  stages and replicas
    layers          decoder layers per stage
    micro_batches   of one replica in one step, `micro_batch` sequences each
    zero            ZeRO level, for the tools that have levels
    recover         drop activations: the rung of RATrain's layers (or "auto"), "inputs" for a peer is
                    torch.utils.checkpoint around each layer, "keep" keeps all
    clip            largest global gradient norm, 0: off
    memory          what one device has, as machine.memory; empty: no limit
    options         what only this tool knows
    """

    name: str
    tool: str
    model: Model
    pipeline: int
    data: int
    layers: tuple[int, ...]
    micro_batch: int
    micro_batches: int
    zero: int
    recover: str
    clip: float
    memory: str
    options: Mapping[str, Any]

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data

    @property
    def global_batch(self) -> int:
        """Sequences of one step."""
        return self.data * self.micro_batches * self.micro_batch

    def place(self, rank: int) -> tuple[int, int]:
        """Stage and replica: ranks of one stage are neighbours, for every tool."""
        return rank // self.data, rank % self.data

    def core(self, rank: int) -> int:
        """Ranks of one stage share a core; without stages each replica has its own."""
        stage, replica = self.place(rank)
        return stage if self.pipeline > 1 else replica

    def microbatch(self, replica: int, number: int) -> range:
        """Sequences of a micro-batch within the step's global batch."""
        start = (replica * self.micro_batches + number) * self.micro_batch
        return range(start, start + self.micro_batch)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Case:
        values = dict(table)
        return cls(**{**values, "model": Model(**values["model"]), "layers": tuple(values["layers"])})


@dataclass(frozen=True)
class Bar:
    """The most that `who` may take, as a share of what `against` takes. "best peer" and "best ratrain" are the
    fastest of those that fit the memory limit."""

    against: str
    most: float
    who: str = RATRAIN


@dataclass(frozen=True)
class Row:
    """Contenders that run in turns.

    set     rows that are run and printed together
    about   what the row shows, a sentence
    link    "loopback", or the rate of each host's link as `tc` writes it; one rank per host then
    steps   of one window
    """

    name: str
    set: str
    about: str
    link: str
    steps: int
    cases: tuple[Case, ...]
    bars: tuple[Bar, ...]

    @property
    def fingerprint(self) -> str:
        """Changes when anything that was run would."""
        text = json.dumps([self.link, self.steps, [case.to_json() for case in self.cases]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_rows(path: Path = ROWS) -> list[Row]:
    """All rows. Keys of a row are defaults for its contenders, which may set any of them themselves.

    Raises ValueError for a key or a contender that nobody knows.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = [_row(entry, table["model"]) for entry in table["row"]]
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two rows of one name")
    return rows


_CASE_DEFAULTS: dict[str, Any] = {
    "pipeline": 1,
    "data": 1,
    "layers": (),
    "micro_batch": 1,
    "micro_batches": 8,
    "zero": 1,
    "recover": "keep",
    "clip": 0.0,
    "memory": "",
}
_ROW_KEYS = ("name", "set", "about", "link", "steps", "contender", "bar")


def _row(entry: Mapping[str, Any], models: Mapping[str, Any]) -> Row:
    shared = {k: v for k, v in entry.items() if k not in _ROW_KEYS}
    cases = tuple(_case(entry["name"], {**shared, **c}, models) for c in entry["contender"])
    known = {case.name for case in cases} | {"best peer", "best ratrain"}
    bars = tuple(Bar(**bar) for bar in entry.get("bar", ()))
    for bar in bars:
        if not {bar.who, bar.against} <= known:
            raise ValueError(
                f"row {entry['name']}: a bar names {bar.who!r} and {bar.against!r}; there are {known}"
            )
    return Row(entry["name"], entry["set"], entry["about"], entry["link"], entry.get("steps", 3), cases, bars)


def _case(row: str, entry: Mapping[str, Any], models: Mapping[str, Any]) -> Case:
    values = {**_CASE_DEFAULTS, **entry}
    model = Model(**models[values.pop("model", "base")])
    odd = values.keys() - _CASE_DEFAULTS.keys() - {"tool", "name", "options"}
    if odd:
        raise ValueError(f"row {row}: unknown key {sorted(odd)[0]!r}")
    stages = values["pipeline"]
    even = [model.layers // stages + (s < model.layers % stages) for s in range(stages)]
    values["layers"] = tuple(values["layers"] or even)
    return Case(**{"name": values["tool"], "options": {}, **values, "model": model})
