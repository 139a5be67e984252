"""Device backends: who computes. All run the same program, messages and state units.

`torch` computes for real. `mt3000` computes every operator tile by tile on an emulated chip and says how long
the chip would have taken. `emulated` computes nothing: it waits as long as a device would, so that pipelines
larger than this machine run with real processes and real messages.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ratrain.errors import UserError
from ratrain.model.blocks import Block, EmbedBlock, HeadBlock, LayerBlock
from ratrain.model.main_grad import accumulate, has_main_grad, zero_if_fresh
from ratrain.model.tensor_parallel import join
from ratrain.runtime.units import StateUnit

if TYPE_CHECKING:
    from ratrain.machine.mt3000.torch_operators import Mt3000

Durations = Mapping[str, float]
"""Seconds of one action on the emulated device, by "KIND unit", e.g. ``"FORWARD layer3"``."""


class TorchBackend:
    """Real torch operators."""

    def adopt(self, block: Block) -> None:
        """Called once per block, after its parameters are bound."""

    def begin(self) -> None:
        """Called when an action on a block begins."""

    def update(self, unit: StateUnit, lr: float, scale: float) -> None:
        """One optimizer step on the unit's shard; see `StateUnit.update`."""
        unit.update(lr, scale)

    def account(self) -> dict[str, Any]:
        """What it would like to have in the metrics of the steps since the last call."""
        return {}


class Mt3000Backend(TorchBackend):
    """Operators on the emulated MT-3000: FP16 inputs, FP32 accumulation, explicit memory hierarchy."""

    def __init__(self) -> None:
        from ratrain.machine.mt3000.torch_operators import Mt3000

        self.chip: Mt3000 = Mt3000(take_gradient=_take)

    def adopt(self, block: Block) -> None:
        from ratrain.machine.mt3000.torch_operators import install, install_norm

        chip = self.chip
        if isinstance(block, LayerBlock):
            install(block.layer, chip)
        elif isinstance(block, EmbedBlock):
            block.forward = partial(_embed, block, chip)  # type: ignore[method-assign]
        elif isinstance(block, HeadBlock):
            if block.spec.head_normalised:
                raise UserError("run.backend = mt3000: a row-normalised head is not on the chip; use torch")
            install_norm(block.norm, chip)
            block.forward = partial(_head, block, chip)  # type: ignore[method-assign]

    def update(self, unit: StateUnit, lr: float, scale: float) -> None:
        gradient, optimizer = unit.shard_gradient(), unit.optimizer
        # Under ZeRO-3 no view stays; the chip writes one all the same.
        view = unit.view[unit.low : unit.high] if unit.keeps_view else torch.empty_like(gradient)
        for s in optimizer.stretches:
            part = slice(s.start, s.stop)
            s.steps.add_(1)
            self.chip.adamw_(
                unit.master[part],
                optimizer.first[part],
                optimizer.second[part],
                gradient[part],
                view[part],
                lr=lr,
                betas=(optimizer.settings.beta1, optimizer.settings.beta2),
                eps=optimizer.settings.eps,
                weight_decay=s.decay,
                step=int(s.steps),
                grad_scale=scale,
            )

    def account(self) -> dict[str, Any]:
        account = self.chip.account
        told = {"chip_s": account.seconds, "chip_bytes": dict(account.bytes)}
        account.reset()
        return told


class EmulatedBackend(TorchBackend):
    """Waits instead of computing. What a block hands on has the right shape and no meaning; gradients are zero.
    What tensor ranks send each other is sent.

    A wait ends when the device would be through, counted from when the action began: what the host does meanwhile
    is part of it, as it is part of a measured block's time.
    """

    def __init__(self, durations: Durations) -> None:
        self._durations = durations
        self._began = 0.0
        _wake_sharply()

    def begin(self) -> None:
        self._began = time.perf_counter()

    def adopt(self, block: Block) -> None:
        block.forward = partial(self._forward, block)

    def update(self, unit: StateUnit, lr: float, scale: float) -> None:
        time.sleep(self._durations[f"UPDATE_SHARD {unit.name}"])

    def _forward(self, block: Block, x: Tensor, *rest: Any) -> Tensor:
        kind = "RECOVER" if block.is_rebuilding else "FORWARD"
        result: Tensor = _Wait.apply(x, next(block.parameters()), self, block)
        self.wait(f"{kind} {block.name}")
        if isinstance(block, EmbedBlock):
            _meet(block, result, 1)
        elif isinstance(block, LayerBlock):
            _meet(block, result, 1 if block.is_rebuilding else 2)
        return result

    def wait(self, action: str) -> None:
        """Sleeps until the action that has begun would be over on the device."""
        left = self._began + self._durations[action] - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Wait(torch.autograd.Function):
    """A block whose backward takes time, and whose gradients are zero. `weight` ties it to the graph: an embedding's
    input needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, backend: EmulatedBackend, block: Block) -> Tensor:
        ctx.backend, ctx.block, ctx.like = backend, block, x if x.is_floating_point() else None
        if block.name == "head":
            return x.new_zeros(())
        if block.name == "embed":
            return torch.zeros(*x.shape, block.spec.hidden, dtype=weight.dtype)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for parameter in ctx.block.parameters():
            zero_if_fresh(parameter)
        like = ctx.like
        upstream = None if like is None else torch.zeros_like(like)
        ctx.backend.wait(f"BACKWARD {ctx.block.name}")
        if upstream is not None:
            _meet(ctx.block, upstream, 1 if ctx.block.name == "head" else 2)
        return upstream, None, None, None


def _meet(block: Block, like: Tensor, times: int) -> None:
    """The sums over a block's tensor ranks, of tensors like this, see `model.tensor_parallel`."""
    if block.ranks is not None:
        for _ in range(times):
            join(like.detach(), block.ranks)


def _wake_sharply() -> None:
    """Linux lets a sleeper oversleep by 50 us, so that wake-ups can be joined; this thread's is to be on time."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


_PR_SET_TIMERSLACK = 29  # linux/prctl.h


def make_backend(name: str, durations: Durations) -> TorchBackend:
    """The backend of that name in the configuration."""
    if name == "mt3000":
        return Mt3000Backend()
    if name == "emulated":
        return EmulatedBackend(durations)
    return TorchBackend()


def _take(parameter: Tensor, gradient: Tensor) -> bool:
    if not has_main_grad(parameter):
        return False
    accumulate(parameter, gradient)
    return True


def _embed(block: EmbedBlock, chip: Mt3000, ids: Tensor) -> Tensor:
    return chip.embedding(ids, block.weight)


def _head(block: HeadBlock, chip: Mt3000, x: Tensor, targets: Tensor, denominator: int) -> Tensor:
    return chip.head_loss(block.norm(x), block.weight, targets, denominator)
