"""A profile: what was measured on a machine, when, and on what. Read by the planner; needs no torch.

Written as JSON. Seconds, bytes, bytes per second and parameters per second throughout.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ratrain.errors import UserError
from ratrain.machine.units import nearest

VERSION = 2


@dataclass(frozen=True)
class Origin:
    """When and on what a profile was measured; `threads` are torch's, a process."""

    measured_at: str
    host: str
    cpu: str
    cores: int
    threads: int
    torch: str
    processes: int


@dataclass(frozen=True)
class BlockTime:
    """Median seconds of one block and micro-batch: `block` is embed, head, or a layer standing for its
    equals.

    `recover` is rebuilding what the rung dropped, 0 for `keep`; `backward` excludes it. `model` names an
    entry of the profile's `models`.
    """

    model: str
    block: str
    rung: str
    micro_batch: int
    seq_len: int
    dtype: str
    forward: float
    recover: float
    backward: float


@dataclass(frozen=True)
class Communication:
    """One kind of transfer in a group of one size: (bytes sent a member, seconds) of the whole operation, at least
    one point, sizes growing.

    `kind` is p2p, reduce_scatter, all_gather or all_reduce, all made of p2p transfers. Messages were sent now and
    then, collectives one after another, as in a run: on links that let a burst pass, a line would miss both.
    """

    kind: str
    group_size: int
    points: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, *_ in self.points]
        if any(len(point) != 2 or min(point) <= 0 for point in self.points) or sizes != sorted(set(sizes)):
            raise UserError(f"profile: points of {self.kind} must be pairs above 0, sizes growing")
        if not sizes:
            raise UserError(f"profile: {self.kind} of {self.group_size} has no points")

    @property
    def alpha(self) -> float:
        """Seconds of the smallest operation."""
        return self.points[0][1]

    def seconds(self, size: float) -> float:
        """Of an operation that sends `size` bytes a member: between points on a line, beyond them at the largest
        one's bandwidth."""
        (first, alpha), (last, longest) = self.points[0], self.points[-1]
        if size <= first:
            return alpha
        if size >= last:
            return longest * size / last
        for (low, fast), (high, slow) in pairwise(self.points):
            if size <= high:
                return fast + (slow - fast) * (size - low) / (high - low)
        raise AssertionError(size)


@dataclass(frozen=True)
class Profile:
    """All measurements of one machine; `optimizer_rate` and `norm_rate` are parameters a second of an update and of
    the gradient's norm; `models` holds the config.json of every model named in `blocks`.

    `slowdown_under_communication` multiplies compute time while a collective runs, `drag_under_compute` the
    collective's while its ranks compute (both 1 if measured alone).
    `runtime_base_memory` is what a process holds before its model.
    """

    origin: Origin
    models: Mapping[str, Mapping[str, Any]]
    blocks: tuple[BlockTime, ...]
    optimizer_rate: float
    norm_rate: float
    runtime_base_memory: float
    communications: tuple[Communication, ...]
    slowdown_under_communication: float
    drag_under_compute: float

    def __post_init__(self) -> None:
        for time in self.blocks:
            if time.model not in self.models:
                raise UserError(f"profile: blocks name model {time.model!r}, which models does not hold")
        if min(self.slowdown_under_communication, self.drag_under_compute) < 1:
            raise UserError("profile: slowdown_under_communication and drag_under_compute must be at least 1")
        if min(self.optimizer_rate, self.norm_rate) <= 0:
            raise UserError("profile: optimizer_rate and norm_rate must be above 0")

    def communication(self, kind: str, group_size: int) -> Communication:
        """The measurement of a kind and group size; UserError names what was measured."""
        for measured in self.communications:
            if (measured.kind, measured.group_size) == (kind, group_size):
                return measured
        have = ", ".join(f"{c.kind} of {c.group_size}" for c in self.communications) or "nothing"
        raise UserError(
            f"the profile has no {kind} of {group_size} (measured: {have}); "
            f"run ratrain profile --nproc {group_size}"
        )

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all. UserError if the place cannot be written."""
        text = json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1, allow_nan=False)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            aside.write_text(text + "\n", encoding="utf-8")
            aside.replace(path)
        except OSError as error:
            raise UserError(f"cannot write profile {path}: {error.strerror}; give a writable place") from None
        finally:
            aside.unlink(missing_ok=True)


def load_profile(path: Path) -> Profile:
    """The profile in a file; UserError in one line if it is missing, damaged, or of another version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"profile {path}: {error.strerror}; make one with ratrain profile") from None
    except ValueError as error:
        raise UserError(f"profile {path} is not JSON: {error}; make it again with ratrain profile") from None
    if not isinstance(content, dict) or content.pop("version", None) != VERSION:
        raise UserError(f"profile {path} is not of version {VERSION}; make it again with ratrain profile")
    profile = _decode(Profile, content, f"profile {path}")
    assert isinstance(profile, Profile)
    return profile


def _decode(expected: Any, value: Any, where: str) -> Any:
    """`value` from JSON as the annotated type `expected`, checked all the way down."""
    origin = typing.get_origin(expected)
    if dataclasses.is_dataclass(expected):
        return _decode_dataclass(expected, _instance(value, dict, where), where)
    if origin is tuple:
        item = typing.get_args(expected)[0]
        entries = _instance(value, list, where)
        return tuple(_decode(item, entry, f"{where}[{i}]") for i, entry in enumerate(entries))
    if origin is not None and issubclass(origin, Mapping):
        item = typing.get_args(expected)[1]
        entries = _instance(value, dict, where)
        return types.MappingProxyType(
            {key: _decode(item, entry, f"{where}.{key}") for key, entry in entries.items()}
        )
    if expected is Any:
        return value
    if expected is float:
        number = float(_instance(value, (int, float), where))
        if not math.isfinite(number) or number < 0:
            raise UserError(f"{where}: expected a finite number of at least 0, not {value}")
        return number
    return _instance(value, expected, where)


def _decode_dataclass(expected: Any, value: dict[str, Any], where: str) -> Any:
    fields = typing.get_type_hints(expected)
    for key in value:
        if key not in fields:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, fields)}")
    for key in fields:
        if key not in value:
            raise UserError(f"{where}: {key} is missing; make the profile again with ratrain profile")
    return expected(**{key: _decode(kind, value[key], f"{where}, {key}") for key, kind in fields.items()})


def _instance(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        name = kind.__name__ if isinstance(kind, type) else "number"
        raise UserError(f"{where}: expected {name}, not {value!r}")
    return value
