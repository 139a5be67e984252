"""A worker's body: from a prepared run to a trainer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ratrain.config import Config
from ratrain.data.sampler import EvaluationSampler, Sampler
from ratrain.data.store import open_store
from ratrain.errors import UserError
from ratrain.model.spec import ModelSpec, ParameterShape
from ratrain.program.layout import Layout
from ratrain.runtime.backends import Durations, make_backend
from ratrain.runtime.build import DTYPES, StageSettings
from ratrain.runtime.manifest import sweep
from ratrain.runtime.mesh import Mesh, build_mesh
from ratrain.runtime.optimizer import Schedule, StepRule
from ratrain.runtime.rendezvous import Rendezvous
from ratrain.runtime.shard_optimizer import AdamW
from ratrain.runtime.trainer import Job, Recorder, Trainer
from ratrain.runtime.units import UnitFormat
from ratrain.runtime.worker import set_title


@dataclass(frozen=True)
class Assignment:
    """A prepared run as the runtime needs it.

    slice_tokens     tokens whose logits exist at a time; 0: all
    formats          names of view, grad and reduce dtype
    weights          folder to load HF weights from, None: fresh ones
    train, validation  token stores
    durations        what backend emulated waits for
    """

    config: Config
    spec: ModelSpec
    layout: Layout
    passes: tuple[str, ...]
    micro_batch: int
    slice_tokens: int
    formats: tuple[str, str, str]
    weights: Path | None
    train: Path
    validation: Path | None
    resume: Path | None
    folder: Path
    checkpoints: Path
    identity: dict[str, object]
    durations: Durations


def work(assignment: Assignment, rendezvous: Rendezvous, recorder: Callable[[Mesh], Recorder | None]) -> bool:
    """Trains this rank's part; returns whether the last step was reached.

    recorder  makes the recorder, on rank 0
    """
    config, layout = assignment.config, assignment.layout
    if rendezvous.world_size != layout.pipeline * layout.replicas * layout.tensor:
        tensor = f" x {layout.tensor} tensor ranks" if layout.tensor > 1 else ""
        raise UserError(
            f"the plan is for {layout.pipeline} stages x {layout.replicas} replicas{tensor}, but "
            f"{rendezvous.world_size} processes were started; start as many as the plan has"
        )
    torch.set_num_threads(_threads(config, rendezvous))
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if rendezvous.device == "cuda"
        else torch.device("cpu")
    )
    mesh = build_mesh(layout.pipeline, layout.replicas, rendezvous.rank, layout.tied_across, layout.tensor)
    part = f", part {mesh.part}" if mesh.tensor > 1 else ""
    set_title(rendezvous.rank, rendezvous.world_size, f"stage {mesh.stage}, replica {mesh.replica}{part}")
    _require_shared(assignment.checkpoints, mesh)
    if mesh.rank == 0:
        sweep(assignment.checkpoints)
    return make_trainer(assignment, mesh, device, recorder(mesh)).run()


def make_trainer(
    assignment: Assignment,
    mesh: Mesh,
    device: torch.device,
    recorder: Recorder | None,
    save_last: bool = True,
) -> Trainer:
    """The trainer of one rank, with its parameters in place. All ranks call this together."""
    config, layout = assignment.config, assignment.layout
    view, grad, wire = (DTYPES[name] for name in assignment.formats)
    train = config.train
    settings = StageSettings(
        config.data.seq_len,
        assignment.micro_batch,
        train.seed,
        UnitFormat(view, grad, wire),
        AdamW(train.weight_decay, train.beta1, train.beta2, train.eps),
        assignment.slice_tokens or None,
    )
    rule = StepRule(
        Schedule(train.lr, train.lr_min_ratio, train.warmup_steps, train.steps),
        train.clip,
        train.loss_scale if view == torch.float16 else None,
        layout.gated,
    )
    samples = assignment.folder / f"samples-{mesh.rank}.jsonl"
    samples.unlink(missing_ok=True)
    job = Job(
        spec=assignment.spec,
        layout=layout,
        passes=assignment.passes,
        settings=settings,
        steps=train.steps,
        global_batch=train.global_batch,
        eval_every=config.eval.every,
        checkpoint_every=train.checkpoint_every,
        keep_checkpoints=train.keep_checkpoints,
        checkpoints=assignment.checkpoints,
        identity=assignment.identity,
        resume=assignment.resume,
        value=_weights(assignment),
        trace_steps=config.run.trace_steps,
        delay=config.run.delay,
        samples=samples if config.run.log_microbatches else None,
        save_last=save_last,
    )
    vocab = assignment.spec.vocab
    sampler = Sampler(
        open_store(assignment.train, vocab_size=vocab), settings.seq_len, job.global_batch, train.seed
    )
    validation = None
    if assignment.validation is not None:
        held_out = open_store(assignment.validation, vocab_size=vocab)
        validation = EvaluationSampler(held_out, settings.seq_len, job.global_batch, config.eval.batches)
    backend = make_backend(config.run.backend, assignment.durations)
    return Trainer(job, mesh, rule, device, sampler, validation, recorder, backend)


def _threads(config: Config, rendezvous: Rendezvous) -> int:
    if config.run.threads:
        return config.run.threads
    if "OMP_NUM_THREADS" in os.environ:
        return int(os.environ["OMP_NUM_THREADS"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", rendezvous.world_size))
    return max(1, len(os.sched_getaffinity(0)) // here)


def _weights(assignment: Assignment) -> Callable[[ParameterShape], Tensor] | None:
    if assignment.weights is None or assignment.resume is not None:
        return None
    from ratrain.model.weights import WeightReader

    reader = WeightReader(assignment.weights, assignment.spec)
    return lambda p: reader.read(p.name)


def _require_shared(folder: Path, mesh: Mesh) -> None:
    """Checkpoints are written by all ranks together, so all must see one folder. UserError otherwise."""
    if mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    token = folder / ".shared"
    mark = [f"{socket.gethostname()} {os.getpid()}"]
    if mesh.rank == 0:
        token.write_text(mark[0])
    dist.broadcast_object_list(mark, src=0, group=mesh.world)
    seen = token.is_file() and token.read_text() == mark[0]
    dist.barrier(mesh.world)
    if mesh.rank == 0:
        token.unlink()
    if not seen:
        raise UserError(
            f"{folder} is not the same folder on host {socket.gethostname()} as on rank 0's host: set run.out "
            "to a directory that all hosts share"
        )
