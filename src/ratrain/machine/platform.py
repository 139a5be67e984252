"""A machine described in a file: what a device holds and computes, and what its links carry.

The file is TOML; `platforms/` beside this module holds those that are shipped. Each value is a small table

    memory_gb = { value = 20, source = "where it was read", confidence = "M" }

whose key says its unit, and whether the prefix is a power of ten (`gb`, 1e9 bytes) or of two (`gib`,
2**30). Here everything is in bytes, seconds, bytes per second and FLOP per second. Confidence is `H`
(primary source), `M` (third party, or derived from primary numbers), `L` (inference), `U` (unverified) or
`fit` (fitted to measurements that the source names).
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from ratrain.errors import UserError
from ratrain.machine.units import Table, nearest

SCHEMA = 1
SHIPPED = Path(__file__).parent / "platforms"
LOCAL = "local"
"""The platform that stands for this machine before it is measured."""

Level = Literal["within_node", "between_nodes"]
Duplex = Literal["full", "half"]
Parameters = TypeVar("Parameters")


@dataclass(frozen=True)
class Provenance:
    """Where one value of a platform file comes from; `value` as written, in the unit that `key` ends in."""

    key: str
    value: float | int | str
    source: str
    confidence: str


@dataclass(frozen=True)
class OperatorModel:
    """Which model prices this device's operators ("roofline", "mt3000"), and that model's own parameters,
    named with their units; none where the model keeps them in a file of its own."""

    name: str
    parameters: Mapping[str, float]

    def read(self, into: type[Parameters]) -> Parameters:
        """The parameters as dataclass `into`, field by field; UserError names a missing or unknown one."""
        known = {field.name: field for field in dataclasses.fields(into)}  # type: ignore[arg-type]
        for name in self.parameters:
            if name not in known:
                raise UserError(
                    f"operator model {self.name}: unknown parameter {name!r}{nearest(name, known)}"
                )
        for name, field in known.items():
            if name not in self.parameters and field.default is dataclasses.MISSING:
                raise UserError(
                    f"operator model {self.name}: parameter {name!r} is missing; add it to the file"
                )
        return into(**self.parameters)


@dataclass(frozen=True)
class Device:
    """What one process owns.

    `memory` is everything the process may use, in bytes (None: a share of what the operating system says);
    `runtime_base_memory` what it uses before it holds a model. Beyond what is live the heap keeps
    `heap_slack_ratio` times what one layer saves and works with, at most `heap_slack_most` bytes. `rates` are
    attainable FLOP/s by operator class and dtype. `optimizer_rate` is parameters updated a second.
    `slowdown_under_communication` multiplies compute time while a transfer runs (1 is none).
    """

    name: str
    memory: float | None
    runtime_base_memory: float
    operator_model: OperatorModel
    rates: Mapping[str, Mapping[str, float]]
    optimizer_rate: float
    slowdown_under_communication: float
    heap_slack_ratio: float = 0.0
    heap_slack_most: float = 0.0

    def rate(self, operator_class: str, dtype: str) -> float:
        """FLOP/s of an operator class ("matmul", "attention") in a dtype ("fp16"); UserError if not given."""
        by_dtype = self.rates.get(operator_class, {})
        if dtype not in by_dtype:
            given = ", ".join(f"{c} {d}" for c, dtypes in self.rates.items() for d in dtypes) or "none"
            raise UserError(f"{self.name} has no rate for {operator_class} in {dtype} (it has: {given})")
        return by_dtype[dtype]


@dataclass(frozen=True)
class Link:
    """One level of the network as one owner sees it: a device within its node, a node among the others.

    `latency` is seconds a message; `bandwidth` bytes/s of one link in one direction; the owner has `count` of
    them in parallel. On a `half` duplex link sending and receiving share the bandwidth.
    """

    latency: float
    bandwidth: float
    count: int = 1
    duplex: Duplex = "full"

    @property
    def total_bandwidth(self) -> float:
        """Bytes/s of all parallel links, one direction."""
        return self.bandwidth * self.count


@dataclass(frozen=True)
class Platform:
    """A machine: its device, how many share a node, the links at both levels, and where each number is from.

    `within_node` is None where a node is one device.
    """

    name: str
    summary: str
    device: Device
    devices_per_node: int
    within_node: Link | None
    between_nodes: Link
    provenance: Mapping[str, Provenance]

    def node_of(self, rank: int) -> int:
        """The node of a rank; ranks fill nodes in order."""
        return rank // self.devices_per_node

    def link(self, level: Level) -> Link:
        """The link of a level; within a node of one device there is nothing to cross."""
        if level == "between_nodes":
            return self.between_nodes
        if self.within_node is None:
            raise ValueError(f"{self.name}: one device a node has no link within")
        return self.within_node


def shipped_platforms() -> tuple[str, ...]:
    """Names of the platforms that come with RATrain."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.toml")))


def load_platform(name_or_path: str | Path) -> Platform:
    """The platform of a shipped name or of a TOML file.

    Raises UserError if there is no such platform, the file is not TOML, or a key is unknown, missing, without
    its unit, source or confidence, or out of range.
    """
    text = str(name_or_path)
    path = Path(text)
    if not text.endswith(".toml"):
        path = SHIPPED / f"{text}.toml"
        if not path.is_file():
            names = shipped_platforms()
            raise UserError(
                f"no platform {text!r}{nearest(text, names)}; shipped are {', '.join(names)}, "
                "or give the path of a .toml file"
            )
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"platform file {path}: {error.strerror}; give a readable .toml file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"platform file {path} is not TOML: {error}") from None
    return _platform(Table(str(path), "", content))


def _platform(root: Table) -> Platform:
    schema = root.plain("schema", int)
    if schema != SCHEMA:
        raise UserError(f"{root.file}: schema {schema} is not known; this version reads schema {SCHEMA}")
    name, summary = root.plain("name", str), root.plain("summary", str)
    devices_per_node = root.count("devices_per_node")
    device = _device(root.table("device"))
    links = root.table("link")
    within = _link(links.table("within_node"), "links_per_device") if devices_per_node > 1 else None
    between = _link(links.table("between_nodes"), "links_per_node")
    root.finish()
    provenance = {key: Provenance(key, *rest) for key, rest in root.seen.items()}
    return Platform(name, summary, device, devices_per_node, within, between, MappingProxyType(provenance))


def _device(table: Table) -> Device:
    rates: dict[str, Mapping[str, float]] = {}
    for operator_class, by_dtype in table.tables("rate"):
        rates[operator_class] = MappingProxyType(by_dtype.every("tflop_per_s"))
    model = table.table("operator_model")
    model_name = model.plain("name", str)
    parameters = MappingProxyType(model.table("parameters").every() if model.has("parameters") else {})
    return Device(
        name=table.plain("name", str),
        memory=_memory(table),
        runtime_base_memory=table.quantity("runtime_base_memory", "bytes", minimum=0.0),
        operator_model=OperatorModel(model_name, parameters),
        rates=MappingProxyType(rates),
        optimizer_rate=table.quantity("optimizer", "parameters_per_s"),
        slowdown_under_communication=table.quantity("slowdown_under_communication", "ratio", minimum=1.0),
        heap_slack_ratio=table.optional("heap_slack_ratio", "ratio"),
        heap_slack_most=table.optional("heap_slack_most", "bytes"),
    )


def _memory(table: Table) -> float | None:
    if not table.has("memory_from"):
        return table.quantity("memory", "bytes")
    table.choice("memory_from", ("operating system",))
    return None


def _link(table: Table, count_key: str) -> Link:
    duplex = table.choice("duplex", ("full", "half"))
    return Link(
        latency=table.quantity("latency", "seconds", minimum=0.0),
        bandwidth=table.quantity("bandwidth", "bytes_per_s"),
        count=table.count(count_key),
        duplex="full" if duplex == "full" else "half",
    )
