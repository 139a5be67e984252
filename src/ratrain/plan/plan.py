"""Plan: every choice of a run's layout, resolved. What the planner writes and the trainer executes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec
from ratrain.plan.forecast import Forecast
from ratrain.plan.precision import BYTES, Precision
from ratrain.program.layout import RUNGS, Layout, place
from ratrain.program.passes import PASSES, build
from ratrain.program.program import Program

FORMAT = "ratrain-plan"
VERSION = 1

OPERATORS = ("torch", "mt3000")
"""Whose operators compute: they save different things for the backward."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with everything that shapes a step. Invalid combinations raise UserError.

    model         fingerprint of the model's shape, see `fingerprint`
    tied          its embedding and head share one matrix
    layers        decoder layers per stage
    data, tensor  replicas, and ranks that share each stage's operators
    zero          ZeRO level 0 to 3
    micro_batch   sequences of one pipeline pass
    global_batch  sequences of one update
    seq_len       tokens of a sequence
    view, grad, reduce  dtypes, see Precision
    rungs         recovery rung of every block, by stage
    ahead, elide, gated, grouped  as in program.Layout
    passes        lifecycle passes
    slice_tokens  tokens whose logits exist at a time; 0: all of a micro-batch
    operators     whose operators compute, one of OPERATORS
    devices       what was asked for; more than the layout has ranks stay idle
    budget        bytes that one device has for its process
    runtime_base  bytes of them that a process holds beside its model and what a step needs (see Target.base)
    platform      what the costs and the budget are from
    forecast      what this is expected to need and to do
    why           the reasons, a sentence each
    """

    model: str
    tied: bool
    layers: tuple[int, ...]
    data: int
    tensor: int = 1
    zero: int
    micro_batch: int
    global_batch: int
    seq_len: int
    view: str
    grad: str
    reduce: str
    rungs: tuple[tuple[str, ...], ...]
    ahead: int
    elide: bool
    gated: bool
    grouped: int = 1
    passes: tuple[str, ...]
    slice_tokens: int = 0
    operators: str = "torch"
    devices: int
    budget: int
    runtime_base: int = 0
    platform: str = "local"
    forecast: Forecast | None = None
    why: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "micro_batch", "global_batch", "seq_len", "devices"):
            if getattr(self, name) < 1:
                raise UserError(f"plan: {name} is {getattr(self, name)}; expected at least 1")
        for name in ("view", "grad", "reduce"):
            if getattr(self, name) not in BYTES:
                raise UserError(
                    f"plan: {name} is {getattr(self, name)!r}; expected one of {', '.join(BYTES)}"
                )
        if self.operators not in OPERATORS:
            raise UserError(f"plan: operators is {self.operators!r}; expected one of {', '.join(OPERATORS)}")
        for name in self.passes:
            if name not in PASSES:
                raise UserError(f"plan: unknown pass {name!r}; passes are {', '.join(PASSES)}")
        check_batches(self.global_batch, self.data, self.micro_batch)
        if self.ranks > self.devices:
            raise UserError(
                f"{self.pipeline} stages x {self.data} replicas x {self.tensor} tensor ranks are "
                f"{self.ranks} devices, but there are {self.devices}; lower one of parallel.*"
            )
        try:
            self.layout()
        except ValueError as error:
            raise UserError(f"plan: {error}") from None

    @property
    def pipeline(self) -> int:
        """Stages P."""
        return len(self.layers)

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.pipeline * self.data * self.tensor

    @property
    def idle(self) -> int:
        """Devices without a rank."""
        return self.devices - self.ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches M of one replica in one update."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def precision(self) -> Precision:
        """The three dtypes."""
        return Precision(self.view, self.grad, self.reduce)

    def layout(self) -> Layout:
        """What a program is built for."""
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        return Layout(
            stages=place(self.layers),
            replicas=self.data,
            microbatches=self.micro_batches,
            zero=self.zero,
            tied=self.tied,
            rungs=self.rungs,
            ahead=self.ahead,
            elide=self.elide,
            gated=self.gated,
            grouped=self.grouped,
            tensor=self.tensor,
        )

    def program(self, form: str = "steady", micro_batches: int | None = None) -> Program:
        """The program of one step, or of the same step with fewer micro-batches."""
        layout = self.layout()
        if micro_batches is not None:
            layout = layout.with_(microbatches=min(self.micro_batches, micro_batches))
        return build(layout, form, self.passes)

    @property
    def settled(self) -> int:
        """Micro-batches after which a step only repeats itself: the pipeline has filled and drained once, and
        `ahead` more have been recovered. In between every further one adds the same actions, one later."""
        return 2 * self.depth + self.ahead + 1

    @property
    def depth(self) -> int:
        """Micro-batches that fill the pipeline, grouped ones included."""
        return self.pipeline + self.grouped - 1

    def require_model(self, spec: ModelSpec) -> None:
        """UserError if this plan is of another model."""
        if self.model != fingerprint(spec):
            raise UserError(
                f"the plan is of model {self.model}, but model.config is {fingerprint(spec)}; plan again"
            )

    def with_(self, **changes: Any) -> Plan:
        """A copy with some choices changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """A plain, versioned form."""
        table = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        table["forecast"] = self.forecast.to_json() if self.forecast else None
        return {"format": FORMAT, "version": VERSION, **table}

    @classmethod
    def from_json(cls, table: object, source: str = "plan") -> Plan:
        """Inverse of `to_json`. UserError, naming `source`, for anything that is not a whole plan of this
        version."""
        if not isinstance(table, Mapping) or table.get("format") != FORMAT:
            raise UserError(f"{source}: not a plan; expected JSON that `ratrain plan` wrote")
        if table.get("version") != VERSION:
            raise UserError(
                f"{source}: plan version {table.get('version')!r}, this RATrain reads {VERSION}; plan again"
            )
        content = {k: v for k, v in table.items() if k not in ("format", "version")}
        hints = typing.get_type_hints(cls)
        known = {f.name for f in dataclasses.fields(cls)}
        for name in sorted(known ^ content.keys()):
            what = "missing" if name in known else "not a field of a plan"
            raise UserError(f"{source}: {name} is {what}; plan again")
        try:
            values = {name: _decode(hints[name], value, name) for name, value in content.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source}: damaged plan: {error}; plan again") from None
        return cls(**values)

    def save(self, path: Path) -> None:
        """Writes the plan whole or not at all; UserError if the place cannot be written."""
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
            aside.replace(path)
        except OSError as error:
            raise UserError(f"cannot write plan {path}: {error.strerror}; give a writable place") from None
        finally:
            aside.unlink(missing_ok=True)


def load_plan(path: Path) -> Plan:
    """The plan in a file; UserError in one line if it is missing, damaged or foreign."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"plan {path}: {error.strerror}; make one with ratrain plan") from None
    except ValueError as error:
        raise UserError(f"plan {path} is not JSON: {error}; make it again with ratrain plan") from None
    return Plan.from_json(table, str(path))


def fingerprint(spec: ModelSpec) -> str:
    """Names a model's shape: equal for configurations that train the same network, e.g.
    ``llama-32x4096-1f0c53d2``."""
    shape = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.compare}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:8]
    return f"{spec.family}-{spec.layers}x{spec.hidden}-{digest}"


def check_batches(global_batch: int, data: int | None, micro_batch: int | None) -> None:
    """UserError if what is given of replicas and micro-batch does not multiply up to the global batch."""
    per_pass = (data or 1) * (micro_batch or 1)
    if global_batch % per_pass:
        near = max(per_pass, round(global_batch / per_pass) * per_pass)
        given = [f"parallel.data {data}"] if data else []
        given += [f"train.micro_batch {micro_batch}"] if micro_batch else []
        raise UserError(
            f"train.global_batch {global_batch} is not a multiple of {per_pass} = {' x '.join(given)}; "
            f"try {near}"
        )


def uniform_rungs(layers: tuple[int, ...], rung: str) -> tuple[tuple[str, ...], ...]:
    """`rung` for every decoder layer; embedding and head have nothing worth recovering and keep."""
    return tuple(
        tuple(rung if block.startswith("layer") else RUNGS[0] for block in blocks) for blocks in place(layers)
    )


def _decode(hint: Any, value: Any, name: str) -> Any:
    """`value` from JSON as the annotated type."""
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} must be a list")
        return tuple(_decode(typing.get_args(hint)[0], item, name) for item in value)
    if isinstance(hint, types.UnionType):
        return None if value is None else Forecast.from_json(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise TypeError(f"{name} must be a {hint.__name__}, not {value!r}")
    return value
