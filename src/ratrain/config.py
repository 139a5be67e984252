"""One typed run configuration: what a RUN.toml may say, with a sentence per field.

Unknown keys are refused with the nearest name; everything but model and corpus has a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratrain.errors import UserError
from ratrain.program.layout import RUNGS

AUTO = "auto"
DTYPES = ("fp32", "bf16", "fp16", "fp64")
BACKENDS = ("torch", "emulated", "mt3000")


def _doc(text: str, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """A field with its documentation, which `ratrain train --help-config` prints."""
    return field(default=default, metadata={"doc": text, **more})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained."""

    config: str = _doc("Hugging Face config.json, or a model folder that holds one")
    weights: str = _doc(
        "auto: loaded when the model folder has them; none: fresh weights from train.seed", AUTO,
        choices=("auto", "none"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What it learns from."""

    corpus: str = _doc("text file, folder, .jsonl, .jsonl.gz, prepared token store, or python-stdlib")
    validation: str = _doc("corpus for evaluation; empty: a part of the corpus, split by document", "")
    tokenizer: str = _doc(
        "HF tokenizer folder or tokenizer.json; train: a byte-level BPE of the model's vocabulary", "train"
    )
    seq_len: int = _doc("tokens per sequence", 1024, least=1)
    skip_bad: bool = _doc("skip and count undecodable lines and documents instead of stopping", False)
    cache: str = _doc("folder for prepared token stores", ".cache/ratrain")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How it learns."""

    steps: int = _doc("updates to run in all", 100, least=1)
    global_batch: int = _doc("sequences per update", 8, least=1)
    micro_batch: int | str = _doc("sequences per pipeline pass; auto: the planner's choice", AUTO, least=1)
    lr: float = _doc("peak learning rate", 3e-4, least=0.0)
    lr_min_ratio: float = _doc(
        "final learning rate of the cosine, as a share of the peak", 0.1, least=0.0, most=1.0
    )
    warmup_steps: int = _doc("updates of linear warm-up", 10, least=0)
    weight_decay: float = _doc("AdamW decay; norms and biases are never decayed", 0.1, least=0.0)
    beta1: float = _doc("AdamW first moment", 0.9, least=0.0, below=1.0)
    beta2: float = _doc("AdamW second moment", 0.95, least=0.0, below=1.0)
    eps: float = _doc("AdamW epsilon", 1e-8, above=0.0)
    clip: float = _doc("global gradient norm limit over all stages and replicas; 0: off", 1.0, least=0.0)
    seed: int = _doc("initial weights, sample order and dropout depend on it and on nothing else", 0)
    checkpoint_every: int = _doc("updates between checkpoints; 0: only at the end", 0, least=0)
    keep_checkpoints: int = _doc("how many checkpoints stay", 2, least=1)
    loss_scale: float = _doc(
        "initial dynamic loss scale with fp16 views; ignored otherwise", 65536.0, above=0.0
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on the validation corpus."""

    every: int = _doc("updates between evaluations; 0: only at the end", 0, least=0)
    batches: int = _doc("global batches per evaluation", 4, least=1)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. fp16 needs backend mt3000 or cuda to be fast; fp32 is the default on CPU."""

    view: str = _doc("what forward and backward read", "fp32", choices=DTYPES)
    grad: str = _doc("gradient accumulation", AUTO, choices=(AUTO, *DTYPES))
    reduce: str = _doc("gradients on the wire; auto: as accumulated", AUTO, choices=(AUTO, *DTYPES))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout. Whatever is auto is planned."""

    pipeline: int | str = _doc("pipeline stages", AUTO, least=1)
    data: int | str = _doc("replicas", AUTO, least=1)
    tensor: int | str = _doc(
        "tensor ranks that compute each block of a stage together; auto plans 1 for a run", AUTO, least=1
    )
    zero: int | str = _doc("ZeRO level 0 to 3", AUTO, least=0, most=3)
    layers: tuple[int, ...] | str = _doc(
        "decoder layers per stage, e.g. [5, 3]; 0 is legal where embedding or head sits", AUTO
    )
    grouped: int | str = _doc(
        "micro-batches at either end of a step that run block by block, so that slow links hide; 1: off; auto: the"
        " planner's choice, 1 where the machine has not been measured", AUTO,
        least=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What is kept of a block between forward and backward, and when the rest is rebuilt."""

    policy: str | dict[str, Any] = _doc(  # noqa: RUF009
        "a rung for all blocks (keep, elementwise, mlp, inputs), auto, or a table: block or stage<i> -> rung",
        AUTO,
    )
    ahead: int | str = _doc(
        "micro-batches besides the one in backward that may hold recovered blocks", AUTO, least=0
    )
    elide: bool | str = _doc(
        "keep everything where backward directly follows forward; auto: when it fits", AUTO
    )


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """What it runs on."""

    platform: str = _doc(
        "a shipped platform, a platform file, or a profile that `ratrain profile` wrote; local: this machine",
        "local",
    )
    devices: int | str = _doc("processes in all; auto: pipeline x data, or every core pair", AUTO, least=1)
    memory: str = _doc(
        "memory of one device with its unit, e.g. 20 GB or 1.5 GiB; auto: the platform's", AUTO
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How it is executed."""

    backend: str = _doc("torch, emulated or mt3000", "torch", choices=BACKENDS)
    device: str = _doc("cpu or cuda", "cpu", choices=("cpu", "cuda"))
    threads: int = _doc("compute threads per process; 0: cores shared out evenly", 0, least=0)
    passes: tuple[str, ...] | str = _doc("lifecycle passes: all, none, or a list of names", "all")
    out: str = _doc("run folder", "runs/run")
    trace_steps: int = _doc("last steps kept in trace.json", 3, least=1)
    log_microbatches: bool = _doc(
        "write sample ids and loss of every micro-batch to samples-RANK.jsonl", False
    )
    delay: float = _doc(
        "for tests: random extra seconds before each communication counts as done", 0.0, least=0.0
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole RUN.toml."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    run: RunConfig = field(default_factory=RunConfig)


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Reads RUN.toml and applies `a.b=value` overrides (values in TOML syntax; bare words are strings).

    Relative paths inside the file are relative to the working directory, as on the command line.
    Raises UserError with one line for anything that is not right.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such run file; expected a RUN.toml, see examples/tiny.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _override(table, override)
    return parse_config(table, str(path))


def parse_config(table: Mapping[str, Any], source: str) -> Config:
    """The configuration in `table`; `source` names it in errors (UserError)."""
    config: Config = _build(Config, table, source, "")
    return config


def to_toml(config: Config) -> str:
    """The configuration as TOML that `load_config` reads back to an equal value."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        value = getattr(config, section.name)
        lines += [f"{f.name} = {_toml(getattr(value, f.name))}" for f in dataclasses.fields(value)]
        lines.append("")
    return "\n".join(lines)


def parse_bytes(text: str, name: str) -> int:
    """Bytes of a size with its unit: GB is a power of ten, GiB of two. UserError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B\s*", text)
    if match is None:
        raise UserError(f"{name} = {text!r}: expected a number with a unit, such as '20 GB' or '1.5 GiB'")
    if float(match[1]) == 0:
        raise UserError(f"{name} = {text!r}: expected more than nothing")
    prefix = match[2] or ""
    base = 1024 if prefix.endswith("i") else 1000
    return int(float(match[1]) * base ** ("KMGT".index(prefix[0]) + 1 if prefix else 0))


def format_bytes(count: float) -> str:
    """Bytes for people, in powers of ten, e.g. 19.57 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def describe() -> list[tuple[str, str, str]]:
    """(name, default, documentation) of every field."""
    rows = []
    for section in dataclasses.fields(Config):
        kind = typing.get_type_hints(Config)[section.name]
        for f in dataclasses.fields(kind):
            default = "required" if f.default is dataclasses.MISSING else _toml(f.default)
            rows.append((f"{section.name}.{f.name}", default, f.metadata["doc"]))
    return rows


def _override(table: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise UserError(f"--set {text}: expected section.name=value, e.g. --set train.steps=10")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    section = table.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise UserError(f"--set {text}: {parts[0]} is not a section")
    section[parts[1]] = value


def _build(kind: type, table: Any, source: str, prefix: str) -> Any:
    if not isinstance(table, Mapping):
        raise UserError(f"{source}: {prefix.rstrip('.') or 'the file'} must be a table")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(known)}"
            raise UserError(f"{source}: unknown key {prefix}{name}{hint}")
    values = {}
    for name, f in known.items():
        hint = hints[name]
        where = f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            values[name] = _build(typing.cast(type, hint), table.get(name, {}), source, f"{where}.")
        elif name in table:
            values[name] = _value(hint, table[name], f, f"{source}: {where}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{source}: {where} is missing; expected: {f.metadata['doc']}")
    return kind(**values)


def _value(hint: Any, value: Any, f: dataclasses.Field[Any], where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    choices = f.metadata.get("choices")
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        more = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{where} = {value!r}: expected one of {', '.join(choices)}{more}")
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    auto_only = str in options and len(options) > 1 and f.name not in ("policy", "passes")
    if isinstance(value, str) and auto_only and value != AUTO:
        raise UserError(f"{where} = {value!r}: expected {_words(options)} or 'auto'")
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, bool) and bool not in options:
        raise UserError(f"{where} = {value!r}: expected {_words(options)}")
    if not any(isinstance(value, typing.get_origin(o) or o) for o in options):
        raise UserError(f"{where} = {value!r}: expected {_words(options)} ({f.metadata['doc']})")
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_range(value, f.metadata, where)
    if value == "" and f.default != "":
        raise UserError(f"{where} is empty; expected: {f.metadata['doc']}")
    if f.name == "policy" and isinstance(value, str) and value not in (AUTO, *RUNGS):
        raise UserError(f"{where} = {value!r}: expected one of auto, {', '.join(RUNGS)}, or a table")
    if f.name == "layers" and isinstance(value, tuple) and not all(type(n) is int and n >= 0 for n in value):
        raise UserError(f"{where} = {list(value)!r}: expected whole numbers of at least 0")
    return value


def _check_range(value: float, limits: Mapping[str, Any], where: str) -> None:
    """UserError unless `value` is finite and within `least` and `most` (inclusive), `above` and `below`."""
    words = {"least": "at least", "above": "more than", "most": "at most", "below": "less than"}
    least, most = limits.get("least", -math.inf), limits.get("most", math.inf)
    above, below = limits.get("above", -math.inf), limits.get("below", math.inf)
    if not (math.isfinite(value) and least <= value <= most and above < value < below):
        span = " and ".join(f"{word} {limits[key]:g}" for key, word in words.items() if key in limits)
        raise UserError(f"{where} = {value!r}: expected {span or 'a finite number'}")


def _words(options: Iterable[Any]) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
        dict: "a table",
    }
    return " or ".join(
        names.get(o, names.get(typing.get_origin(o) or o, "a list"))
        for o in options
        if not (o is str and len(tuple(options)) > 1)
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML string
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    return repr(value)
