"""The rule of a step: learning rate, clipping, dynamic loss scale. Equal on every rank, from equal inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratrain.errors import UserError

if TYPE_CHECKING:
    from ratrain.runtime.stage import StepReport

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_GROWTH_INTERVAL = 2000  # clean updates before a loss scale doubles, as torch.amp.GradScaler
_MIN_SCALE = 1.0
_PATIENCE = 10  # overflows in a row at the smallest scale before the run is given up


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine from `peak` to `peak * floor` at `total` updates."""

    peak: float
    floor: float
    warmup: int
    total: int

    def __call__(self, position: int) -> float:
        """Learning rate of the update number `position`, counted from 0."""
        if position < self.warmup:
            return self.peak * (position + 1) / self.warmup
        span = max(self.total - self.warmup, 1)
        share = min((position - self.warmup) / span, 1.0)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share)))


class StepRule:
    """Decides each step from the global loss and norm.

    applied      updates applied so far: the position in the schedule; a skipped update does not move it
    loss_scale   factor on the loss of the coming backward; 1.0 when no scale is used
    """

    def __init__(
        self, schedule: Callable[[int], float], clip: float, loss_scale: float | None, gated: bool
    ) -> None:
        """
        clip        largest global norm; 0: off
        loss_scale  initial dynamic scale, None: none
        gated       updates wait for the norm; otherwise a non-finite value ends the run
        """
        self.schedule, self.clip, self.gated = schedule, clip, gated
        self.dynamic = loss_scale is not None
        self.loss_scale = 1.0 if loss_scale is None else loss_scale
        self.applied = 0
        self.clean = 0
        self.stuck = 0

    def conclude(
        self, loss: float, square: float, stop: bool, stats: tuple[tuple[float, ...], ...], train: bool
    ) -> StepReport:
        """What GRAD_NORM decides. Raises UserError for a non-finite value that may not be skipped."""
        from ratrain.runtime.stage import StepReport

        if not train:
            return StepReport(loss, 0.0, False, stop, 0.0, 1.0, stats)
        norm = math.sqrt(square) / self.loss_scale if square >= 0 else math.nan
        finite = math.isfinite(norm) and math.isfinite(loss)
        lr, scale = self.schedule(self.applied), 1.0 / self.loss_scale
        if not finite and not self.gated:
            raise UserError(
                f"non-finite gradient or loss (loss {loss}, norm {norm}) at update {self.applied}, nothing "
                "saved: lower train.lr, or set train.clip > 0 to skip such updates"
            )
        if finite and self.clip > 0 and norm > self.clip:
            scale *= self.clip / (norm + _EPSILON)
        self._after(finite)
        return StepReport(loss, norm, not finite, stop, lr, scale, stats)

    def _after(self, finite: bool) -> None:
        if finite:
            self.applied += 1
            self.clean += 1
            self.stuck = 0
            if self.dynamic and self.clean >= _GROWTH_INTERVAL:
                self.loss_scale, self.clean = self.loss_scale * 2, 0
            return
        self.clean = 0
        if not self.dynamic:
            self.stuck += 1
        elif self.loss_scale > _MIN_SCALE:
            self.loss_scale = max(self.loss_scale / 2, _MIN_SCALE)
        else:
            self.stuck += 1
        if self.stuck >= _PATIENCE:
            raise UserError(
                f"{self.stuck} non-finite gradients in a row, nothing saved since: lower train.lr or look "
                "at the data of these steps"
            )

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {
            "applied": self.applied,
            "loss_scale": self.loss_scale,
            "clean": self.clean,
            "stuck": self.stuck,
        }

    def restore(self, state: dict[str, float]) -> None:
        """Inverse of `state`. A scale is only taken over by a run that uses one."""
        self.applied, self.clean = int(state["applied"]), int(state["clean"])
        self.stuck = int(state["stuck"])
        if self.dynamic:
            self.loss_scale = float(state["loss_scale"])
