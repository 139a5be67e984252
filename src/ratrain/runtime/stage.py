"""What each action means on this rank: the table of handlers that the executor runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratrain.data.sampler import SequenceSource
from ratrain.model import segment
from ratrain.model.blocks import Block
from ratrain.program.action import Action, Kind
from ratrain.program.layout import EMBED, HEAD, TIED, Layout
from ratrain.program.program import Program
from ratrain.program.schedule import gradient_order
from ratrain.runtime.backends import TorchBackend
from ratrain.runtime.collectives import RankOrderReducer, gather_vectors
from ratrain.runtime.device import HostStreams
from ratrain.runtime.executor import Handler, Step
from ratrain.runtime.mesh import Mesh
from ratrain.runtime.optimizer import StepRule
from ratrain.runtime.units import StateUnit


@dataclass(eq=False)
class StageStep(Step):
    """A step as the handlers see it.

    number       the update's number, from 0 (of an evaluation: its batch)
    source       where sequences come from
    program      its program (which rung applies to whom)
    train        False: evaluation
    position     updates applied before it, where the update does not wait for the norm
    denominator  target tokens of the global batch
    stop         this rank was asked to end
    stats        gives the numbers that this rank hands in at GRAD_NORM (as many on every rank)
    losses       per micro-batch: its share of the global loss (last stage)
    sample_ids   per micro-batch: which data it was (first and last stage)
    report       filled by GRAD_NORM
    account      what the backend has to say of it, for the metrics
    """

    source: SequenceSource = None  # type: ignore[assignment]
    program: Program = None  # type: ignore[assignment]
    train: bool = True
    position: int = 0
    stop: bool = False
    denominator: int = 0
    stats: Callable[[], tuple[float, ...]] = tuple
    losses: dict[int, Tensor] = field(default_factory=dict)
    sample_ids: dict[int, list[int]] = field(default_factory=dict)
    report: StepReport | None = None
    account: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """What GRAD_NORM told every rank, equal on all of them.

    loss       sum over target tokens of the global batch divided by their number
    norm       global gradient norm before clipping (of the unscaled gradient)
    skipped    a non-finite gradient: no rank updates
    stop       some rank was asked to end
    lr, scale  what the update uses: learning rate, and the factor on the gradient
    stats      per rank the numbers that it handed in (`StageStep.stats`)
    """

    loss: float
    norm: float
    skipped: bool
    stop: bool
    lr: float
    scale: float
    stats: tuple[tuple[float, ...], ...]


class Stage:
    """One rank's blocks, units and messages."""

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        blocks: Mapping[str, Block],
        units: Mapping[str, StateUnit],
        micro_batch: int,
        seed: int,
        rule: StepRule,
        seeds_random: bool,
        device: torch.device,
        backend: TorchBackend,
        streams: HostStreams | None = None,
    ) -> None:
        """
        blocks        this stage's, in forward order
        micro_batch   sequences per micro-batch
        rule          learning rate, clipping and loss scale
        seeds_random  whether the model draws random numbers (dropout)
        backend       who computes
        """
        self.mesh, self.layout, self.blocks, self.units = mesh, layout, dict(blocks), dict(units)
        self.micro_batch, self.seed, self.rule, self.device = micro_batch, seed, rule, device
        self.seeds_random, self.backend = seeds_random, backend
        self.streams = streams or HostStreams()
        self.names = layout.stages[mesh.stage]
        self.first, self.final = self.names[0], self.names[-1]
        self.next_block = dict(zip(self.names, self.names[1:]))
        # Of several readers of a unit the last is the first to contribute to its gradient.
        opener = {u.name: u.readers[-1] for u in layout.units[mesh.stage]}
        order = gradient_order(layout, mesh.stage)
        self._opens = {n: [unit for unit in order if opener[unit] == n] for n in self.names}
        self.pair = RankOrderReducer(mesh.tied)
        self._view_dtype = next(iter(self.units.values())).formats.view
        self._inputs: dict[tuple[str, int], Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._segments: dict[tuple[str, int], segment.Segment] = {}
        self._grads: dict[tuple[str, int], Tensor] = {}
        self._grad_outputs: dict[int, Tensor] = {}
        self._incoming: dict[tuple[Kind, int], tuple[dist.Work, Tensor]] = {}

    @property
    def handlers(self) -> dict[Kind, Handler]:
        """What to do for each kind of action."""
        table: dict[Kind, Callable[[Action, Any], None]] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.RECOVER: self.recover,
            Kind.SEND_ACT: self.send_act,
            Kind.RECV_ACT: self.receive,
            Kind.SEND_GRAD: self.send_grad,
            Kind.RECV_GRAD: self.receive,
            Kind.GRAD_SYNC: self.grad_sync,
            Kind.TIED_SYNC: self.tied_sync,
            Kind.GRAD_NORM: self.grad_norm,
            Kind.UPDATE_SHARD: self.update_shard,
            Kind.PREFETCH_VIEW: self.prefetch_view,
            Kind.RELEASE: self.release,
        }
        return table

    @property
    def posts(self) -> dict[Kind, Handler]:
        """Receives are posted ahead of the handler that waits for them."""
        table: dict[Kind, Callable[[Action, Any], None]] = {
            Kind.RECV_ACT: self.post_receive,
            Kind.RECV_GRAD: self.post_receive,
        }
        return table

    def sequences(self, microbatch: int) -> range:
        """Indices within the global batch of a micro-batch of this replica: replicas hold equal runs."""
        start = (self.mesh.replica * self.layout.microbatches + microbatch) * self.micro_batch
        return range(start, start + self.micro_batch)

    def forward(self, action: Action, step: StageStep) -> None:
        self.backend.begin()
        name, j = _block(action)
        block = self.blocks[name]
        if name == EMBED:
            data = step.source.sequences(step.number, self.sequences(j))
            step.sample_ids[j] = data.sample_ids.tolist()
            inputs: tuple[Any, ...] = (torch.from_numpy(data.inputs).to(self.device),)
        else:
            inputs = (self._inputs.pop((name, j)),)
        if name == HEAD:
            data = step.source.sequences(step.number, self.sequences(j))
            step.sample_ids[j] = data.sample_ids.tolist()
            inputs = (*inputs, torch.from_numpy(data.targets).to(self.device), step.denominator)
        self._seed(step, j, name)
        if self.seeds_random:
            block.train(step.train)
        rung = step.program.keeps(self.mesh.stage, name, j) if step.train else "keep"
        output, saved = segment.forward(block, inputs, rung, grad=step.train)  # type: ignore[arg-type]
        if saved is not None:
            self._segments[name, j] = saved
        if name == HEAD:
            step.losses[j] = output
        elif name == self.final:
            self._outputs[j] = output
        else:
            self._inputs[self.next_block[name], j] = output

    def recover(self, action: Action, step: StageStep) -> None:
        self.backend.begin()
        name, j = _block(action)
        self._seed(step, j, name)
        self._segments[name, j].recover()

    def backward(self, action: Action, step: StageStep) -> None:
        self.backend.begin()
        name, j = _block(action)
        for unit in self._opens[name]:
            self.units[unit].open_gradient()
        saved = self._segments.pop((name, j))
        gradient = None if name == HEAD else self._grads.pop((name, j))
        if name == HEAD and self.rule.loss_scale != 1.0:
            gradient = torch.tensor(self.rule.loss_scale, device=self.device)
        upstream = saved.backward(gradient)
        if upstream is None:
            return
        if name == self.first:
            self._grad_outputs[j] = upstream
        else:
            self._grads[self.names[self.names.index(name) - 1], j] = upstream

    def post_receive(self, action: Action, step: StageStep) -> None:
        j = action.microbatch
        assert j is not None
        upstream = action.kind is Kind.RECV_ACT
        shape = (self.micro_batch, step.source.seq_len, self.blocks[self.first].spec.hidden)
        buffer = torch.empty(shape, dtype=self._view_dtype, device=self.device)
        peer = self.mesh.rank_of(self.mesh.stage + (-1 if upstream else 1), self.mesh.replica)
        work = dist.irecv(buffer, src=peer, group=self.mesh.act if upstream else self.mesh.grad)
        assert work is not None
        self._incoming[action.kind, j] = (work, buffer)

    def receive(self, action: Action, step: StageStep) -> None:
        j = action.microbatch
        assert j is not None
        work, buffer = self._incoming.pop((action.kind, j))
        work.wait()
        self.streams.use(buffer)
        if action.kind is Kind.RECV_ACT:
            self._inputs[self.first, j] = buffer
        else:
            self._grads[self.final, j] = buffer

    def send_act(self, action: Action, step: StageStep) -> None:
        assert action.microbatch is not None
        self._send(self._outputs.pop(action.microbatch), self.mesh.stage + 1, self.mesh.act)

    def send_grad(self, action: Action, step: StageStep) -> None:
        assert action.microbatch is not None
        self._send(self._grad_outputs.pop(action.microbatch), self.mesh.stage - 1, self.mesh.grad)

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup | None) -> None:
        self.streams.use(tensor)
        work = dist.isend(tensor.contiguous(), dst=self.mesh.rank_of(stage, self.mesh.replica), group=group)
        assert work is not None
        work.wait()

    def grad_sync(self, action: Action, step: StageStep) -> None:
        self._unit(action).synchronise()

    def tied_sync(self, action: Action, step: StageStep) -> None:
        """First stage's gradient plus last stage's; their shards are cut alike, so shards are enough."""
        self.pair.add_pair(self.units[TIED].shard_gradient())

    def grad_norm(self, action: Action, step: StageStep) -> None:
        """One gather of a small vector per rank; every rank then sums the rows in rank order."""
        loss = math.fsum(float(part) for part in step.losses.values()) if self.mesh.part == 0 else 0.0
        square = 0.0
        if step.train:
            counted = [u for u in self.units.values() if u.counts_in_norm]
            if self.layout.zero > 0 or self.mesh.replica == 0:
                square = math.fsum(u.squared_norm() for u in counted)
        row = torch.tensor([loss, square, float(step.stop), *step.stats()], dtype=torch.float64)
        table = gather_vectors(row.to(self.device), self.mesh.world).cpu()
        losses, squares, stops = (table[:, i].tolist() for i in range(3))
        stats = tuple(tuple(r) for r in table[:, 3:].tolist())
        step.report = self.rule.conclude(
            sum(losses), sum(squares), stop=any(stops), stats=stats, train=step.train
        )

    def update_shard(self, action: Action, step: StageStep) -> None:
        meant = step.of(action)
        assert isinstance(meant, StageStep)
        if not self.rule.gated:
            self.backend.update(self._unit(action), self.rule.schedule(meant.position), 1.0)
            return
        assert meant.report is not None
        if not meant.report.skipped:
            self.backend.update(self._unit(action), meant.report.lr, meant.report.scale)

    def prefetch_view(self, action: Action, step: StageStep) -> None:
        self._unit(action).gather_view()

    def release(self, action: Action, step: StageStep) -> None:
        if action.phase == "act":
            return  # backward has let go of everything; the action tells readers of the program when
        unit = self._unit(action)
        if action.phase != "grad":
            unit.release_view()
        elif action.microbatch is not None:
            unit.release_microbatch_gradient()
        else:
            unit.release_gradient()

    def leftovers(self) -> list[str]:
        """What should not exist between steps: saved activations, messages, gathered views. For tests."""
        left = [f"segment {k}" for k in self._segments] + [f"input {k}" for k in self._inputs]
        left += [f"gradient {k}" for k in self._grads] + [f"output {k}" for k in self._outputs]
        for unit in self.units.values():
            if unit.holders:
                left.append(f"view of {unit.name}")
        return left

    def _unit(self, action: Action) -> StateUnit:
        assert action.unit is not None
        return self.units[action.unit]

    def _seed(self, step: StageStep, microbatch: int, block: str) -> None:
        """Random numbers depend on (seed, step, micro-batch of the global order, block) and nothing else."""
        if not self.seeds_random or not step.train:
            return
        index = self.mesh.replica * self.layout.microbatches + microbatch
        key = hashlib.sha256(f"{self.seed}/{step.number}/{index}/{block}".encode()).digest()
        torch.manual_seed(int.from_bytes(key[:8], "big") >> 1)


def _block(action: Action) -> tuple[str, int]:
    assert action.unit is not None and action.microbatch is not None
    return action.unit, action.microbatch
