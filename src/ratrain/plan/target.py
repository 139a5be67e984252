"""Where a plan is to run: memory and operators of one device, and what its costs can be taken from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ratrain.config import AUTO, MachineConfig, parse_bytes
from ratrain.machine.platform import LOCAL, Platform, load_platform
from ratrain.machine.profile import Profile, load_profile
from ratrain.plan.activations import ActivationModel

LAYER = "layer0"
"""The layer that stands for all."""


@dataclass(frozen=True)
class Target:
    """name          as in machine.platform
    memory        bytes that one device has for its process
    runtime_base  bytes of them that a process holds before its model
    heap_ratio, heap_most  what the heap keeps beyond what is live: a multiple of one layer's bytes, and no more
                  bytes than that
    operators     whose operators compute, as in Plan
    source        what costs are taken from
    """

    name: str
    memory: int
    runtime_base: int
    heap_ratio: float
    heap_most: int
    operators: str
    source: Platform | Profile

    @property
    def platform(self) -> Platform | None:
        """The platform, unless costs are from a profile."""
        return self.source if isinstance(self.source, Platform) else None

    def base(self, activations: ActivationModel) -> int:
        """Bytes of a process beside its model and what a step holds: the runtime, and the heap's slack, which
        goes with what one layer saves and works with."""
        layer = activations.saved(LAYER, "keep") + activations.working(LAYER)
        return self.runtime_base + min(int(self.heap_ratio * layer), self.heap_most)


def load_target(config: MachineConfig, devices: int) -> Target:
    """The machine that `machine.platform` names: this one, a platform, or a profile (.json).

    `devices` processes share this machine's memory evenly where `machine.memory` is left to it.
    """
    memory = None if config.memory == AUTO else parse_bytes(config.memory, "machine.memory")
    if config.platform.endswith(".json"):
        profile = load_profile(Path(config.platform))
        device = load_platform(LOCAL).device  # a profile is of a machine like this one
        name, base, operators = config.platform, profile.runtime_base_memory, "torch"
        source: Platform | Profile = profile
    else:
        source = load_platform(config.platform)
        device = source.device
        name, base = source.name, device.runtime_base_memory
        operators = "mt3000" if device.operator_model.name == "mt3000" else "torch"
    return Target(
        name,
        memory or int(device.memory or _physical_memory() // devices),
        int(base),
        device.heap_slack_ratio,
        int(device.heap_slack_most),
        operators,
        source,
    )


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
