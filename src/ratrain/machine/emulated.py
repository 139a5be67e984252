"""A made-up device for backend `emulated`: how long it would compute, beside links that are real and measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratrain.machine.profile import BlockTime, Profile


@dataclass(frozen=True)
class EmulatedDevice:
    """Seconds of a sequence of fp32: (forward, backward) of each kind of block. `recover` is a rung's share of a
    forward, `optimizer_rate` parameters a second."""

    embed: tuple[float, float]
    layer: tuple[float, float]
    head: tuple[float, float]
    optimizer_rate: float
    recover: tuple[tuple[str, float], ...] = (
        ("keep", 0.0),
        ("elementwise", 0.12),
        ("mlp", 0.6),
        ("inputs", 1.0),
    )

    def slower(self, times: float) -> EmulatedDevice:
        """A device that takes so many times as long."""

        def longer(passes: tuple[float, float]) -> tuple[float, float]:
            return passes[0] * times, passes[1] * times

        return dataclasses.replace(
            self,
            embed=longer(self.embed),
            layer=longer(self.layer),
            head=longer(self.head),
            optimizer_rate=self.optimizer_rate / times,
        )

    def profile(self, measured: Profile, model: Mapping[str, Any], seq_len: int) -> Profile:
        """A profile with this device's times and what `measured` says of the links and of the host, which sums up
        gradient norms for real. Waiting takes no longer beside transfers."""
        kinds = {"embed": self.embed, "layer0": self.layer, "head": self.head}
        blocks = tuple(
            BlockTime("emulated", block, rung, 1, seq_len, "fp32", forward, share * forward, backward)
            for block, (forward, backward) in kinds.items()
            for rung, share in self.recover
            if block == "layer0" or rung in ("keep", "inputs")
        )
        return dataclasses.replace(
            measured,
            models={"emulated": model},
            blocks=blocks,
            optimizer_rate=self.optimizer_rate,
            runtime_base_memory=0.0,
            slowdown_under_communication=1.0,
            drag_under_compute=1.0,
        )
