"""AdamW on a shard: torch's own, on at most two stretches, one with weight decay and one without."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class AdamW:
    """Optimizer settings that do not change during a run."""

    weight_decay: float
    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True)
class Stretch:
    """Elements [start, stop) of a shard that share a decay class.

    steps   updates so far, the 0-d tensor that AdamW counts in
    """

    start: int
    stop: int
    decay: float
    parameter: nn.Parameter
    steps: Tensor


class ShardOptimizer:
    """Moments and updates of one shard's master weights."""

    def __init__(self, master: Tensor, decayed: int, settings: AdamW) -> None:
        """
        master   1-D [shard], updated in place
        decayed  the first so many elements are decayed, the rest (padding included) is not
        """
        self.settings = settings
        self.first = torch.zeros_like(master)
        self.second = torch.zeros_like(master)
        self.stretches: list[Stretch] = []
        groups = []
        for start, stop, decay in (
            (0, decayed, settings.weight_decay),
            (decayed, master.numel(), 0.0),
        ):
            if start == stop:
                continue
            parameter = nn.Parameter(master[start:stop])
            steps = torch.zeros((), dtype=torch.float32, device=master.device)
            self.stretches.append(Stretch(start, stop, decay, parameter, steps))
            groups.append({"params": [parameter], "weight_decay": decay})
        self._adamw = torch.optim.AdamW(
            groups, lr=0.0, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True
        )
        for s in self.stretches:
            # Made here and not by the first step, so that peak memory is known from the start.
            self._adamw.state[s.parameter] = {
                "step": s.steps,
                "exp_avg": self.first[s.start : s.stop],
                "exp_avg_sq": self.second[s.start : s.stop],
            }

    def step(self, gradient: Tensor, lr: float, scale: float) -> None:
        """One update from `gradient` (1-D [shard]) times `scale`. An fp32 gradient is scaled in place; a
        16-bit one is widened first, so that taking off a loss scale loses nothing."""
        for s, group in zip(self.stretches, self._adamw.param_groups):
            group["lr"] = lr
            wide = gradient[s.start : s.stop].to(s.parameter.dtype)
            if scale != 1.0:
                wide *= scale
            s.parameter.grad = wide
        self._adamw.step()
        for s in self.stretches:
            s.parameter.grad = None

    def set_updates(self, count: int) -> None:
        """Sets the step count (bias correction) after a checkpoint was read."""
        for s in self.stretches:
            s.steps.fill_(count)
