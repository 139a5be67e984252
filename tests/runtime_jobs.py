"""The child side of `runtime_world.py`: what one rank does with a training configuration, and what it tells.

The trainer is the product's own; it is watched by wrapping methods of its objects.
"""

from __future__ import annotations

import hashlib
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ratrain.program.action import Kind
from ratrain.program.layout import RUNGS, Layout, place
from ratrain.program.passes import PASSES

# Sizes that divide by nothing, so that shards are padded and cut through parameters.
ODD_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 15,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "intermediate_size": 31,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}

DEFAULTS: dict[str, Any] = {
    "model": {},  # changes to ODD_MODEL
    "layers": (3,),
    "data": 1,
    "zero": 1,
    "microbatches": 2,
    "micro_batch": 2,
    "seq_len": 12,
    "rungs": "keep",  # one for all blocks; "mixed": every rung in turn
    "ahead": 1,
    "elide": True,
    "grouped": 1,
    "tensor": 1,
    "passes": tuple(PASSES),
    "clip": 0.0,
    "loss_scale": None,
    "view": "fp32",
    "grad": None,  # as the view's, fp32 under bf16
    "reduce": None,  # as grad
    "lr": 3e-3,
    "warmup": 2,
    "horizon": 50,  # steps of the whole learning-rate schedule
    "steps": 3,
    "seed": 5,
    "eval_every": 0,
    "tokens": 997,  # random ones; a list: these
    "masked": {},  # step -> indices of the global batch whose targets do not count
    "delay": 0.0,
    "delay_seed": 0,
    "checkpoint_every": 0,
    "folder": None,  # of checkpoints; None: none is saved
    "resume": None,
    "wreck": None,  # (steps, rank, what): see Watch._wreck
    "reducer": None,  # "reversed": sums in another order, which must be noticed
}


def layout_of(config: dict[str, Any]) -> Layout:
    """The layout that a whole configuration describes."""
    stages = place(config["layers"])
    rungs, at = [], 0
    for blocks in stages:
        mixed = config["rungs"] == "mixed"
        rungs.append(
            tuple(RUNGS[-1 - (at + i) % 4] if mixed else config["rungs"] for i in range(len(blocks)))
        )
        at += len(blocks)
    return Layout(
        stages,
        replicas=config["data"],
        microbatches=config["microbatches"],
        zero=config["zero"],
        tied=bool(config["model"].get("tie_word_embeddings")),
        rungs=tuple(rungs),
        ahead=config["ahead"],
        elide=config["elide"],
        grouped=config["grouped"],
        tensor=config["tensor"],
        gated=config["clip"] > 0 or config["loss_scale"] is not None,
    )


def spec_of(config: dict[str, Any]) -> Any:
    """The model of a configuration, its layers counted from the placement."""
    from ratrain.model.spec import ModelSpec

    return ModelSpec.from_dict(ODD_MODEL | {"num_hidden_layers": sum(config["layers"])} | config["model"])


def global_batch(config: dict[str, Any]) -> int:
    """Sequences per update."""
    return int(config["data"] * config["microbatches"] * config["micro_batch"])


def samplers(config: dict[str, Any]) -> tuple[Any, Any]:
    """Training and evaluation data. Evaluation reads two batches of the same tokens."""
    import numpy as np

    from ratrain.data.sampler import IGNORED, EvaluationSampler, Sampler, Sequences
    from ratrain.data.store import StoreHeader, TokenStore

    vocab = spec_of(config).vocab
    tokens = config["tokens"]
    ids = np.random.default_rng(1).integers(0, vocab, tokens) if isinstance(tokens, int) else np.array(tokens)
    header = StoreHeader(vocab, "<u2", len(ids), 1, int(ids.max()), 0, "test", None, 0.0, "")
    store = TokenStore(Path("memory"), header, ids.astype("<u2"))
    masked: dict[int, tuple[int, ...]] = config["masked"]

    class Masked(Sampler):
        """Takes targets away, as a corpus with instructions does."""

        def sequences(self, step: int, indices: range) -> Sequences:
            found = super().sequences(step, indices)
            for row, index in enumerate(indices):
                if index in masked.get(step, ()):
                    found.targets[row] = IGNORED
            return found

        def target_tokens(self, step: int) -> int:
            return int((self.sequences(step, range(self.global_batch)).targets != IGNORED).sum())

    batch = global_batch(config)
    training = Masked(store, config["seq_len"], batch, config["seed"])
    return training, EvaluationSampler(store, config["seq_len"], batch, 2) if config["eval_every"] else None


def schedule_of(config: dict[str, Any]) -> Any:
    """The learning-rate schedule."""
    from ratrain.runtime.optimizer import Schedule

    return Schedule(config["lr"], 0.1, config["warmup"], config["horizon"])


def adamw_of(config: dict[str, Any]) -> Any:
    """Optimizer settings."""
    from ratrain.runtime.shard_optimizer import AdamW

    return AdamW(weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)


def serve(rank: int, size: int, port: int, connection: Connection) -> None:
    """A rank's life: joins the others, then answers `(module:function, arguments)` until the pipe closes."""
    import torch
    import torch.distributed as dist

    from ratrain.errors import UserError

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        connection.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        module, function = name.split(":")
        try:
            answer = ("done", getattr(import_module(module), function)(arguments))
        except UserError as error:
            answer = ("refused", str(error))
        except Exception:
            answer = ("error", traceback.format_exc())
        try:
            connection.send(answer)
        except BrokenPipeError:  # nobody waits for it any more
            return


def train(config: dict[str, Any], watcher: type[Watch] | None = None) -> dict[str, Any]:
    """Runs this rank's trainer and tells what `Watch` (or a class made of it) saw."""
    import torch
    import torch.distributed as dist

    from ratrain.runtime.build import DTYPES, StageSettings
    from ratrain.runtime.mesh import build_mesh
    from ratrain.runtime.optimizer import StepRule
    from ratrain.runtime.trainer import Job, Trainer
    from ratrain.runtime.units import UnitFormat

    layout = layout_of(config)
    view = config["view"]
    grad = config["grad"] or ("fp32" if view == "bf16" else view)
    formats = UnitFormat(DTYPES[view], DTYPES[grad], DTYPES[config["reduce"] or grad])
    settings = StageSettings(
        config["seq_len"], config["micro_batch"], config["seed"], formats, adamw_of(config)
    )
    rule = StepRule(schedule_of(config), config["clip"], config["loss_scale"], layout.gated)
    spec = spec_of(config)
    folder = config["folder"]
    job = Job(
        spec=spec,
        layout=layout,
        passes=config["passes"],
        settings=settings,
        steps=config["steps"],
        global_batch=global_batch(config),
        eval_every=config["eval_every"],
        checkpoint_every=config["checkpoint_every"],
        keep_checkpoints=3,
        checkpoints=Path(folder or "unused"),
        identity={},
        resume=Path(config["resume"]) if config["resume"] else None,
        delay=config["delay"],
        save_last=folder is not None,
    )
    mesh = build_mesh(layout.pipeline, layout.replicas, dist.get_rank(), layout.tied_across, layout.tensor)
    training, evaluation = samplers(config)
    watch = (watcher or Watch)(config)
    try:
        trainer = Trainer(
            job, mesh, rule, torch.device("cpu"), training, evaluation, watch if mesh.rank == 0 else None
        )
        watch.attach(trainer)
        trainer.run()
        return watch.told(trainer)
    finally:
        for group in (mesh.sync, mesh.prefetch, mesh.tied, mesh.act, mesh.grad, mesh.parts, mesh.world):
            if group is not None:
                dist.destroy_process_group(group)


class Watch:
    """Recorder of rank 0's metrics and witness of what a trainer does."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.metrics: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.runs: list[tuple[str, Any]] = []
        self.gradients: dict[str, Any] = {}
        self.tied: list[str] = []
        self.leftovers: list[list[str]] = []
        self.in_flight = 0
        self.recovered = 0

    def update(self, metrics: Any) -> None:
        self.metrics.append(dict(metrics))

    def evaluation(self, metrics: Any) -> None:
        self.evaluations.append(dict(metrics))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def trace(self, timeline: Any) -> None:
        pass

    def attach(self, trainer: Any) -> None:
        """Wraps the trainer's objects."""
        import random

        from ratrain.runtime.collectives import RankOrderReducer

        executor, stage = trainer.executor, trainer.stage
        executor._random = random.Random(self.config["delay_seed"] * 1000 + trainer.mesh.rank)
        form_of = {id(lane): form for form, lane in trainer.lanes.items()}
        run, finish = executor.run, executor.finish
        forward, backward = (executor._handlers[kind] for kind in (Kind.FORWARD, Kind.BACKWARD))

        def watched_run(lane: Any, step: Any) -> None:
            self.runs.append((form_of[id(lane)], step))
            run(lane, step)

        def watched_finish(step: Any) -> None:
            finish(step)
            if not any(s.unfinished for _, s in self.runs):
                self.leftovers.append(stage.leftovers())

        def watched_forward(action: Any, step: Any) -> None:
            forward(action, step)
            self.in_flight = max(self.in_flight, len({j for _, j in stage._segments}))

        def watched_backward(action: Any, step: Any) -> None:
            ready = {
                j for (name, j), s in stage._segments.items() if s.recovered and name.startswith("layer")
            }
            self.recovered = max(self.recovered, len(ready))
            backward(action, step)

        executor.run, executor.finish = watched_run, watched_finish
        executor._handlers[Kind.FORWARD] = watched_forward
        executor._handlers[Kind.BACKWARD] = watched_backward
        for unit in stage.units.values():
            self._watch_updates(unit, trainer.rule)
            if self.config["reducer"] == "reversed":
                assert isinstance(unit.sync, RankOrderReducer)
                unit.sync.reduce_scatter = _reversed_sum(unit.sync)
        if self.config["wreck"] is not None:
            self._wreck(executor, stage)

    def _watch_updates(self, unit: Any, rule: Any) -> None:
        update = unit.update

        def watched(lr: float, scale: float) -> None:
            if unit.name not in self.gradients:
                # Under a loss scale, clipping off, `scale` is what takes it away again.
                factor = scale if rule.dynamic else 1.0
                self.gradients[unit.name] = unit.shard_gradient().clone() * factor
            update(lr, scale)
            if unit.name == "tied":
                self.tied.append(_digest(unit.master))

        unit.update = watched

    def _wreck(self, executor: Any, stage: Any) -> None:
        """Overwrites gradients right after the last backward of a step that contributes to them.

        `wreck = (steps, rank, value)`: on one rank, the first element of every unit becomes `value`.
        `wreck = (steps, None, table)`: on all ranks, all elements of a unit become what `table` has for it,
        or 0.
        """
        steps, rank, what = self.config["wreck"]
        backward = executor._handlers[Kind.BACKWARD]
        units = stage.layout.units[stage.mesh.stage]

        def wrecked(action: Any, step: Any) -> None:
            backward(action, step)
            if step.number not in steps or action.microbatch != stage.layout.microbatches - 1:
                return
            for unit in (stage.units[u.name] for u in units if u.readers[0] == action.unit):
                if rank is None:
                    unit.grad[: unit.count] = what.get(unit.name, 0.0)
                elif rank == stage.mesh.rank:
                    unit.grad[0] = what

        executor._handlers[Kind.BACKWARD] = wrecked

    def told(self, trainer: Any) -> dict[str, Any]:
        """Everything in plain values and numpy arrays."""
        stage = trainer.stage
        weights = {name: unit.master for name, unit in stage.units.items()}
        moments = {name: (unit.optimizer.first, unit.optimizer.second) for name, unit in stage.units.items()}
        kinds = {
            "weight": weights,
            "m": {name: pair[0] for name, pair in moments.items()},
            "v": {name: pair[1] for name, pair in moments.items()},
            "gradient": self.gradients,
        }
        return {
            "stage": trainer.mesh.stage,
            "replica": trainer.mesh.replica,
            "part": trainer.mesh.part,
            "metrics": self.metrics,
            "evaluations": self.evaluations,
            "notes": self.notes,
            "steps": [self._step(form, step) for form, step in self.runs],
            "pieces": {kind: _pieces(stage, tensors) for kind, tensors in kinds.items()},
            "views": {n: _digest(u.view[: u.count]) for n, u in stage.units.items() if u.keeps_view},
            "tied": self.tied,
            "leftovers": self.leftovers,
            "in_flight": self.in_flight,
            "recovered": self.recovered,
            "rule": trainer.rule.state(),
            "updates": sorted({int(s.steps) for u in stage.units.values() for s in u.optimizer.stretches}),
        }

    def _step(self, form: str, step: Any) -> dict[str, Any]:
        report = step.report
        return {
            "form": form,
            "number": step.number,
            "train": step.train,
            "losses": {j: float(loss) for j, loss in step.losses.items()},
            "sample_ids": dict(step.sample_ids),
            "loss": None if report is None else report.loss,
            "skipped": report is not None and report.skipped,
            "rows": [(row.stream, str(row.action)) for row in step.rows],
        }


def _pieces(stage: Any, tensors: dict[str, Any]) -> list[tuple[str, int, Any]]:
    found = []
    for name, tensor in tensors.items():
        for piece in stage.units[name].pieces():
            stretch = tensor[piece.start : piece.start + piece.length].detach().clone()
            found.append((piece.name, piece.offset, stretch.numpy()))
    return found


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _reversed_sum(reducer: Any) -> Any:
    """A reduce-scatter that sums from the last rank to the first: a bug that equality must notice."""
    import torch
    import torch.distributed as dist

    def reduce_scatter(buffer: Any) -> Any:
        count = buffer.numel() // reducer.size
        table = torch.empty(reducer.size * buffer.numel(), dtype=buffer.dtype)
        dist.all_gather_single(table, buffer, group=reducer.group)
        rows = table.view(reducer.size, -1)[:, reducer.me * count : (reducer.me + 1) * count]
        total = rows[-1].clone()
        for row in rows.flip(0)[1:]:
            total += row
        own = buffer[reducer.me * count : (reducer.me + 1) * count]
        own.copy_(total)
        return own

    return reduce_scatter
