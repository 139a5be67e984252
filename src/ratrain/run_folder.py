"""What a run needs to know before any process starts, and the folder that keeps it.

`prepare_run` does everything that can fail on bad input: configuration, model, plan, program, weights, data,
checkpoint. Workers only read what it wrote.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratrain.config import AUTO, Config, load_config, parse_bytes, to_toml
from ratrain.data.aside import written_aside
from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec, load_spec
from ratrain.plan.plan import Plan, load_plan
from ratrain.report.files import write_whole

RUN_TOML, PLAN_JSON, SETUP_JSON = "run.toml", "plan.json", "setup.json"
FORECAST_JSON = "forecast.json"
MODEL_JSON, TOKENIZER, CHECKPOINTS = "model.json", "tokenizer", "checkpoints"
SPLIT_SEED = 0
"""Of the train/validation split and the tokenizer's sample: runs with other train.seed stay comparable."""

_CHECKED_WHOLE = 100_000
"""Passes of a block over a micro-batch in a step, up to which a run's programs are checked whole (a minute)."""


@dataclass(frozen=True)
class Run:
    """A run, ready to start.

    train, validation  token stores; validation None: no evaluation
    resume             checkpoint to start from, None: fresh
    statistics         what is known of the data, for people
    identity           settings that a checkpoint must share to be gone on with
    durations          seconds of actions on an emulated device; empty for other backends
    """

    folder: Path
    config: Config
    spec: ModelSpec
    plan: Plan
    train: Path
    validation: Path | None
    resume: Path | None
    statistics: dict[str, Any]
    identity: dict[str, Any]
    durations: dict[str, float]


def resolve_plan(
    config: Config,
    spec: ModelSpec,
    plan_file: Path | None,
    devices: int | None,
    recipe: str | None = None,
    *,
    to_run: bool = False,
) -> Plan:
    """The plan in `plan_file`, that of a named recipe, or the one that `config` resolves to; UserError if it does
    not fit the budget.

    to_run  whether a recipe must use exactly these devices
    """
    from ratrain.plan.resolve import named, resolve

    if recipe is not None:
        if plan_file is not None:
            raise UserError("--recipe and --plan: a plan is laid out already; give one of the two")
        return named(recipe, config, spec, devices=devices, to_run=to_run)
    if plan_file is None:
        return resolve(config, spec, devices=devices)
    plan = load_plan(plan_file)
    plan.require_model(spec)
    for name, want, have in _planned(config, plan):
        if want not in (have, AUTO):
            raise UserError(f"{plan_file}: planned for {name} = {have}, the run has {want}; plan again")
    if devices is not None and devices != plan.ranks:
        raise UserError(f"{plan_file}: a plan for {plan.ranks} processes, but {devices} are to run")
    return plan


def _planned(config: Config, plan: Plan) -> Iterator[tuple[str, Any, Any]]:
    """Settings that a plan fixes: name, what the configuration says, what the plan says."""
    from ratrain.plan.precision import resolve_precision

    memory, precision = config.machine.memory, resolve_precision(config.precision)
    gated = config.train.clip > 0 or precision.view == "fp16"
    yield "data.seq_len", config.data.seq_len, plan.seq_len
    yield "train.global_batch", config.train.global_batch, plan.global_batch
    yield "train.micro_batch", config.train.micro_batch, plan.micro_batch
    yield "parallel.pipeline", config.parallel.pipeline, plan.pipeline
    yield "parallel.data", config.parallel.data, plan.data
    yield "parallel.tensor", config.parallel.tensor, plan.tensor
    yield "parallel.grouped", config.parallel.grouped, plan.grouped
    yield "parallel.zero", config.parallel.zero, plan.zero
    yield "parallel.layers", config.parallel.layers, plan.layers
    yield "precision.view", precision.view, plan.view
    yield "precision.grad", precision.grad, plan.grad
    yield "precision.reduce", precision.reduce, plan.reduce
    yield "clipping", "on" if gated else "off", "on" if plan.gated else "off"
    yield "machine.memory", memory if memory == AUTO else parse_bytes(memory, "machine.memory"), plan.budget


def check_programs(plan: Plan, spec: ModelSpec, *, whole: bool = True) -> None:
    """Raises UserError if a program of the plan is illegal or does not fit.

    whole  check the very programs that run; otherwise, or where these are so long that checking would take
           minutes, the same with fewer micro-batches. That is enough for order, deadlock and memory, since
           from `Plan.settled` on a step repeats one pattern.
    """
    from ratrain.plan.memory import footprints
    from ratrain.program.checker import ProgramError, require_legal

    shapes = footprints(spec, plan)
    long = plan.micro_batches * len(spec.block_names()) > _CHECKED_WHOLE
    micro_batches = plan.settled if long or not whole else None
    for form in ("first", "steady", "flush", "evaluate"):
        try:
            require_legal(plan.program(form, micro_batches), shapes, plan.budget)
        except ProgramError as error:
            raise UserError(f"{form} program: {error.violations[0].message}") from None


def prepare_run(
    config: Config,
    plan_file: Path | None = None,
    devices: int | None = None,
    resume: str = "auto",
    progress: Callable[[str, int, int], None] | None = None,
    recipe: str | None = None,
) -> Run:
    """Checks everything and writes the run folder. Raises UserError, nothing half-written."""
    from ratrain.data.prepare import prepare
    from ratrain.data.store import open_store

    spec = load_spec(Path(config.model.config))
    plan = resolve_plan(config, spec, plan_file, devices, recipe, to_run=True)
    _check_machine(config)
    if plan.tensor > 1:
        _check_tensor(config, plan, spec)
    check_programs(plan, spec)
    _check_weights(config, spec)
    tokenizer = None if config.data.tokenizer == "train" else config.data.tokenizer
    prepared = prepare(
        config.data.corpus,
        config.data.validation or None,
        tokenizer,
        spec.vocab,
        config.data.cache,
        SPLIT_SEED,
        progress,
        skip_bad=config.data.skip_bad,
    )
    store = open_store(prepared.train, vocab_size=spec.vocab)
    if prepared.validation is not None:
        open_store(prepared.validation, vocab_size=spec.vocab)
    identity = {
        "data.seq_len": plan.seq_len,
        "train.global_batch": plan.global_batch,
        "train.seed": config.train.seed,
        "corpus checksum": store.header.checksum,
    }
    folder = Path(config.run.out)
    chosen = find_checkpoint(folder, resume, spec, identity, plan.tensor)
    run = Run(
        folder,
        config,
        spec,
        plan,
        prepared.train.resolve(),
        prepared.validation.resolve() if prepared.validation is not None else None,
        chosen,
        dataclasses.asdict(prepared.statistics),
        identity,
        _durations(config, plan, spec),
    )
    _write(run, prepared.tokenizer)
    _write_forecast(run)
    return run


def find_checkpoint(
    folder: Path, resume: str, spec: ModelSpec, identity: dict[str, Any], tensor: int = 1
) -> Path | None:
    """The checkpoint that `resume` (auto, never, or a path) means; UserError if it does not fit this run."""
    if resume == "never":
        return None
    from ratrain.runtime.manifest import check_fits, complete, read_manifest

    if resume == "auto":
        found = complete(folder / CHECKPOINTS)
        if not found:
            return None
        path = found[-1]
    else:
        path = Path(resume)
    shapes = {name: list(p.shape) for name, p in spec.all_parameters().items()}
    check_fits(read_manifest(path), path, shapes, identity, tensor)
    return path


def read_run(folder: Path) -> Run:
    """What `prepare_run` wrote."""
    config = load_config(folder / RUN_TOML)
    setup = json.loads((folder / SETUP_JSON).read_text())
    return Run(
        folder,
        config,
        load_spec(folder / MODEL_JSON),
        load_plan(folder / PLAN_JSON),
        Path(setup["train"]),
        Path(setup["validation"]) if setup["validation"] else None,
        Path(setup["resume"]) if setup["resume"] else None,
        setup["statistics"],
        setup["identity"],
        setup["durations"],
    )


def model_folder(config: Config) -> Path | None:
    """The folder whose weights are to be loaded; None where fresh ones are wanted."""
    path = Path(config.model.config)
    folder = path if path.is_dir() else path.parent
    if config.model.weights == "none":
        return None
    from ratrain.model.weights import has_weights

    return folder if has_weights(folder) else None


_DRAWN = 50_000
"""Actions of a replica above which no forecast is drawn beside the run: the page could not show them anyway."""


def _write_forecast(run: Run) -> None:
    """What the simulator says of the run, for the report to lay under what is measured."""
    if run.plan.program("steady").size() > _DRAWN:
        return
    from ratrain.plan.forecasting import forecast_step
    from ratrain.report.forecast import forecast_of, write_forecast

    forecast = forecast_step(run.plan, run.spec, run.config)
    write_forecast(forecast_of(run.plan, forecast), run.folder / FORECAST_JSON)


def _durations(config: Config, plan: Plan, spec: ModelSpec) -> dict[str, float]:
    if config.run.backend != "emulated":
        return {}
    from ratrain.plan.forecasting import action_seconds

    return action_seconds(plan, spec, config)


def _check_machine(config: Config) -> None:
    """UserError if this machine, or this version, cannot execute a run as it is asked for."""
    if config.run.backend != "torch" and config.run.device != "cpu":
        raise UserError(f"run.backend = {config.run.backend} runs on run.device = cpu only")
    if config.run.backend == "mt3000" and config.precision.view != "fp16":
        raise UserError(
            f"run.backend = mt3000 computes in FP16, but precision.view = {config.precision.view}; set it to fp16"
        )
    if config.run.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("run.device = cuda: torch finds no CUDA device here; set run.device to cpu")


def _check_tensor(config: Config, plan: Plan, spec: ModelSpec) -> None:
    """UserError if the runtime cannot run this with tensor ranks."""
    from ratrain.model.tensor_slice import cannot_run

    reason = cannot_run(spec)
    if config.run.backend == "mt3000":
        reason = "the emulated chip's head has the whole vocabulary"
    if reason is not None:
        raise UserError(f"parallel.tensor = {plan.tensor} does not run: {reason}; set it to 1")


def _check_weights(config: Config, spec: ModelSpec) -> None:
    folder = model_folder(config)
    if folder is not None:
        from ratrain.model.weights import check_weights

        check_weights(folder, spec)


def _write(run: Run, tokenizer: Path | None) -> None:
    """Every file whole or not at all; a folder that was not there before is not left behind half-filled."""
    folder = run.folder
    setup = {
        "train": str(run.train),
        "validation": str(run.validation) if run.validation else None,
        "resume": str(run.resume) if run.resume else None,
        "statistics": run.statistics,
        "identity": run.identity,
        "durations": run.durations,
    }
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RUN_TOML, to_toml(run.config))
        run.plan.save(folder / PLAN_JSON)
        write_whole(folder / MODEL_JSON, json.dumps(run.spec.raw, indent=1) + "\n")
        if tokenizer is not None:
            with written_aside(folder / TOKENIZER) as aside:
                shutil.copytree(tokenizer, aside, dirs_exist_ok=True)
        write_whole(folder / SETUP_JSON, json.dumps(setup, indent=1) + "\n")
    except (OSError, UserError) as error:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, UserError):
            raise
        reason = error.strerror or error
        raise UserError(
            f"run.out = {folder}: cannot be written ({reason}); name another folder with --out"
        ) from None
